"""A model family is one file: nothing else of the product speaks its name."""

import importlib
import re
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from model_defs import ModelConfig, families, load_config
from model_defs.weights import weight_specs
from tests.support.models.checkpoints import SMALL, keeps_states, own_fields

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = ("kvforge", "model_defs", "plugins", "perf")
OWN = {ROOT / f"model_defs/{name}.py" for name in families()}
WRITTEN_OUT = {
    "perf/training/config.py",
    "perf/engine/scheduler.py",
    "perf/peers/prepare.py",
    "perf/harness/published_shapes.py",
    "perf/harness/random_checkpoint.py",
    "kvforge/gateway/languages/tool_formats/deepseek_v3.py",
    "kvforge/gateway/languages/tool_formats/deepseek_v31.py",
    "kvforge/gateway/languages/tool_formats/granite.py",
    "kvforge/gateway/languages/tool_formats/mistral.py",
    "kvforge/checkpoint/draft_head.py",
    "kvforge/checkpoint/gguf/pre_tokenizers.py",
    "kvforge/checkpoint/gguf/vocabulary.py",
    "perf/peers/gguf_worker.py",
}
"""Files that hold the configuration of a model of their own; a format of tool calls, recognised by the chat template
whatever the family, that is known by its maker's name; the family whose layer draft heads have; and llama.cpp's
names of tokenizers, which models of any family may have, and of its own class."""


def spoken(text: str) -> set[str]:
    """The families that a text names, as such or by a class of transformers; ``llama-3.1-8b`` and ``mistral-small`` are
    models, not families, ``llama3`` is a scaling of RoPE, and ``llama.cpp`` a program."""
    names = "|".join(map(re.escape, families()))
    pattern = rf"\b({names})(?:_?swiftkv)?(?:\w*For\w+|\w*Config)?\b(?!-|[. ]?\d|\.cpp)"
    return {match[1].lower() for match in re.finditer(pattern, text, re.IGNORECASE)}


def test_nobody_else_names_a_family() -> None:
    files = [file for folder in PRODUCT for file in (ROOT / folder).rglob("*.py") if file not in OWN]
    assert len(files) > 400
    found = {str(file.relative_to(ROOT)) for file in files if spoken(file.read_text())}
    assert found == WRITTEN_OUT
    assert all(spoken(file.read_text()) for file in OWN)


@pytest.mark.parametrize(
    "text",
    [
        'family == "qwen2"',
        "{'llama': 1}",
        '"mistral_swiftkv"',
        "Qwen3ForCausalLM",
        "LlamaSwiftKVForCausalLM",
        "a Llama",
    ],
)
def test_the_rule_is_able_to_fail(text: str) -> None:
    assert len(spoken(text)) == 1
    assert not spoken("llama-3.1-8b, qwen2.5-7b, mistral-small-2409, Llama 3.1, llama3, arc_challenge_llama, LLAMA_8B")


@pytest.mark.parametrize("name", families())
def test_a_family_is_in_the_file_of_its_name(name: str) -> None:
    assert importlib.import_module(f"model_defs.{name}").FAMILY is families()[name]


@pytest.mark.parametrize("name", families())
def test_what_a_family_says_of_itself_is_true(name: str) -> None:
    """Its traits are those of its configurations, with and without a cut; the common names stay as they are."""
    family = families()[name]
    cuts = ({}, {"num_key_value_layers": 2, "key_value_group_size": 2, "early_exit": not keeps_states(name)})
    for cut in cuts if family.is_rewired else cuts[:1]:
        config: ModelConfig = load_config(
            {**SMALL, **own_fields(name, SMALL), **cut, "model_type": f"{name}_swiftkv" if cut else name}
        )
        assert config.model_type == name and (family.is_rewired or not config.may_be_cut)
        assert {trait: getattr(config, trait) for trait in family.traits} == family.traits
        names = [source.name for spec in weight_specs(config) for source in spec.sources]
        assert [family.weight_name(each) for each in names] == names
    assert family.architecture.endswith("ForCausalLM")


def test_the_documentation_lists_every_family() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/checkpoints.md").read_text().split("\n## ")[0], re.MULTILINE)
    assert rows == ["model_type", *families()], "each family has a row in docs/checkpoints.md, in alphabetical order"


@pytest.mark.parametrize("name", sorted(families().keys() & CONFIG_MAPPING_NAMES.keys()))
def test_the_class_in_transformers_exists(name: str) -> None:
    """Random checkpoints are made by it: without it a family is left out of the tests of all families."""
    architecture = families()[name].architecture
    assert hasattr(transformers, architecture), f"transformers has {name}, but no class {architecture}"
