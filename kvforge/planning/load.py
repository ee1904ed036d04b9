"""What ``--model`` names: a preset, a config.json, a checkpoint, which may be a GGUF file, or an engine."""

import dataclasses
from pathlib import Path

from kvforge.common.checkpoint_files import gguf_name, is_gguf
from kvforge.common.errors import CheckpointError, KvforgeError
from kvforge.common.number_formats import (
    INT4_WEIGHTS,
    KV_FORMATS,
    automatic_dtype,
    automatic_kv_dtype,
    keeping_int4,
)
from kvforge.costs.weights import step_weight_bytes, weight_bits
from kvforge.hub import find_config, parse_name
from kvforge.kv_policies import Full, KVPolicy, Need
from kvforge.manifest import MANIFEST_FILE, load_manifest
from kvforge.planning.plan import DEFAULT_STEP_TOKENS
from kvforge.planning.presets import PRESETS
from model_defs import ModelConfig, families
from model_defs.draft_head import DraftHead
from model_defs.mtp import mtp_head


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to plan for, as it is: the cuts and group sizes to show unless told otherwise, its dtypes, KV policy,
    page size, tokens of a step and draft head. ``int4_dtype`` is what a build makes of the weight dtype int4,
    ``weight_bits`` are of an engine in which some layers are int8 beside those in 4 bits."""

    name: str
    model: ModelConfig
    cuts: tuple[int, ...]
    group_sizes: tuple[int, ...] = (1, 2, 4)
    weight_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    policy: KVPolicy = dataclasses.field(default_factory=Full)
    page_size: int = 32
    step_tokens: int = DEFAULT_STEP_TOKENS
    is_engine: bool = False
    head: DraftHead | None = None
    int4_dtype: str = "int4"
    weight_bits: float | None = None

    def with_module(self) -> "Subject":
        """Return it with a module for multi-token prediction that shares the model's embedding and LM head, as draft
        head. Raises KvforgeError for an engine, and for a family without modules."""
        family = families().get(self.model.model_type)
        if self.is_engine or family is None or family.mtp is None:
            raise KvforgeError(
                f"--draft-head mtp is for checkpoints of families with such a module, which {self.name} is not one "
                "of; leave it out."
            )
        return dataclasses.replace(
            self, head=dataclasses.replace(mtp_head(self.model), own_embedding=False, own_lm_head=False)
        )

    def with_weights(self, dtype: str) -> "Subject":
        """Return it with weights of another dtype, and the cache that a build would choose with them; an engine keeps
        its own, and a checkpoint the static format that it was calibrated for and its weights in 4 bits."""
        dtype = keeping_int4(dtype, self.int4_dtype)
        found = dataclasses.replace(self, weight_dtype=dtype, weight_bits=None)
        if self.is_engine or KV_FORMATS[self.kv_dtype].scales == "static":
            return found
        return dataclasses.replace(found, kv_dtype="float32" if dtype == "float32" else "bfloat16")

    def with_bits(self, bits: float) -> "Subject":
        """Return it with layers in int8 beside those in 4 bits, so that a weight has so many ``bits``. Raises
        KvforgeError where that cannot be."""
        if self.weight_dtype not in INT4_WEIGHTS:
            raise KvforgeError(
                f"--weight-bits is for weights in 4 bits, and {self.name} has {self.weight_dtype} weights; give "
                f"--weight-dtype {' or '.join(INT4_WEIGHTS)} too, or leave it out."
            )
        least = weight_bits(self.model, step_weight_bytes(self.model, self.weight_dtype))
        if not least <= bits < 8:
            raise KvforgeError(
                f"--weight-bits is {bits:g}, and {self.weight_dtype} weights of {self.name} have {least:.2f} bits; "
                "give so many or more, and less than 8."
            )
        return dataclasses.replace(self, weight_bits=bits)


def load_subject(model: str, revision: str | None = None) -> Subject:
    """Return what ``model`` names; ``revision`` is a repository's.

    Raises:
        KvforgeError: it names nothing, or what it names cannot be read as a supported model.
    """
    if model in PRESETS:
        return Subject(model, PRESETS[model].model, PRESETS[model].cuts)
    name = parse_name(model, revision)
    if name is not None:
        return _from_config(find_config(name), name.repository.partition("/")[2])
    path = Path(model)
    if not path.exists():
        raise KvforgeError(
            f"{model} is neither a preset nor a path; give a preset ({', '.join(PRESETS)}), the path of an engine, "
            "checkpoint or config.json, or OWNER/NAME on the Hub."
        )
    if (path / MANIFEST_FILE).is_file():
        manifest = load_manifest(path)
        if manifest.predicts:
            raise KvforgeError(
                f"{path} fills the cache of prompts by another model, which plans do not count; plan the checkpoint "
                "that it was built from."
            )
        subject = _own(path.resolve().name, manifest.model)
        return dataclasses.replace(
            subject,
            weight_dtype=manifest.weight_dtype,
            weight_bits=manifest.weight_bits if manifest.int8_layers else None,
            kv_dtype=manifest.kv_dtype,
            policy=manifest.policy if Need.OWN_CACHE in manifest.policy.needs else Full(),  # on a cache of any format
            page_size=manifest.page_size,
            step_tokens=manifest.max_num_tokens,
            is_engine=True,
            head=manifest.draft_head,
        )
    if is_gguf(path):
        return _from_checkpoint(path, gguf_name(path.resolve()))
    if path.is_dir() and not (path / "config.json").is_file():
        raise KvforgeError(f"{path} is neither an engine ({MANIFEST_FILE}) nor a checkpoint (config.json); give one.")
    file = path / "config.json" if path.is_dir() else path
    folder = file.parent if file.name == "config.json" else path
    title = file.resolve().parent.name if file.name == "config.json" else file.stem
    return _from_checkpoint(folder, title) if any(folder.glob("*.safetensors")) else _from_config(file, title)


def _from_checkpoint(path: Path, name: str) -> Subject:
    """With the dtypes that ``kvforge build`` chooses by the stored weights."""
    from kvforge.checkpoint.model import int4_dtype, open_model, read_model_config

    checkpoint = open_model(path)
    quantization = checkpoint.quantization
    algorithm = None if quantization is None else quantization.kv_cache_algo
    dtype = automatic_dtype(checkpoint.dtype("model.embed_tokens.weight"))
    kv_dtype = automatic_kv_dtype(dtype, algorithm)
    config = read_model_config(checkpoint)
    return dataclasses.replace(
        _own(name, config),
        weight_dtype=dtype,
        kv_dtype=kv_dtype,
        int4_dtype=int4_dtype(checkpoint, config),
    )


def _from_config(file: Path, name: str) -> Subject:
    """Of a config.json; without weights, the dtype is the one that it names."""
    from kvforge.common.json_files import read_json
    from model_defs import ModelError, load_config

    hf = read_json(file)
    try:
        config = load_config(hf)
    except ModelError as error:
        raise CheckpointError(f"{file}: {error}") from None
    dtype = automatic_dtype("F32" if hf.get("dtype", hf.get("torch_dtype")) in ("float32", "float64") else "BF16")
    return dataclasses.replace(_own(name, config), weight_dtype=dtype, kv_dtype=dtype)


def _own(name: str, model: ModelConfig) -> Subject:
    """A model with a cut is shown as it is, one without at half its layers."""
    if not (model.may_be_cut or model.layer_owners):
        return Subject(name, model, (), (1,))
    if model.layer_owners:
        return Subject(name, model, (model.cut,), (1,))
    if model.has_cut:
        return Subject(
            name, model, (model.cut,), tuple(sorted({1, min(model.group_size, model.num_layers - model.cut)}))
        )
    return Subject(name, model, (max(model.num_layers // 2, 1),) if model.num_layers > 1 else ())
