"""SwiftKV models for vLLM, out of tree: vLLM calls ``register`` in each of its processes (``vllm.general_plugins``).

Imported under vLLM's interpreter: this package needs vLLM, transformers and ``model_defs``, and nothing else of ours.
``coverage`` needs ``model_defs`` alone; ``cpu_worker`` is what kvforge's engines have in place of vLLM's own.
"""

import functools
from typing import Any

MODEL = "kvforge.vllm_models.causal_lm:SwiftKVForCausalLM"


def register() -> None:
    """Make vLLM read checkpoints with a cut of every family that transformers knows too; may be called again."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from model_defs import families

    for config_class in _config_classes().values():
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    for family in families().values():
        ModelRegistry.register_model(family.swiftkv_architecture, MODEL)


@functools.cache
def _config_classes() -> dict[str, Any]:
    """Return by their names the classes of a ``config.json`` with a cut."""
    from transformers import CONFIG_MAPPING

    from model_defs import families

    classes: dict[str, Any] = {}
    for model_type in families().keys() & CONFIG_MAPPING.keys():
        base = CONFIG_MAPPING[model_type]
        name = f"SwiftKV{base.__name__}"
        classes[name] = type(name, (base,), {"model_type": f"{model_type}_swiftkv", "__module__": __name__})
    return classes


def __getattr__(name: str) -> Any:
    """A configuration's class: processes of several ranks send each other configurations, which name it."""
    if name.startswith("SwiftKV") and name in _config_classes():
        return _config_classes()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
