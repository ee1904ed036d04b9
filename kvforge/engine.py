"""The engine directory: the manifest that compiler and runtime share, and the names of the files in it."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvforge.errors import EngineError, EngineReplacedError
from kvforge.kv_policies import Full, KVPolicy, OwnerCache, load
from kvforge.manifest_check import is_possible
from kvforge.number_formats import KV_FORMATS, SCALE_BYTES, WEIGHT_BYTES, KVFormat

SCHEMA_VERSION = 6
MANIFEST_FILE = "engine.json"
MANIFEST_DIGEST = "manifest_sha256"
"""The key of ``engine.json`` that holds the SHA-256 of all the others: graphs are compiled for what they say."""

TOKENIZER_DIR = "tokenizer"
RANK_DIR = "rank0"
WEIGHTS_FILE = f"{RANK_DIR}/weights.safetensors"
OPERATORS_FILE = f"{RANK_DIR}/operators.so"


def graph_names(max_draft_len: int, early_exit: bool) -> tuple[str, ...]:
    """Return the names of an engine's graphs, in the order they are built: ``early_exit`` only where the model has that
    head, ``verify`` only where there are drafts."""
    optional = {"early_exit": early_exit, "verify": max_draft_len > 0}
    return ("lower", "upper", *(name for name, is_there in optional.items() if is_there))


def package_file(graph: str) -> str:
    """Return where the AOTInductor package of a graph lies in an engine."""
    return f"{RANK_DIR}/{graph}.pt2"


@dataclass(frozen=True)
class Manifest:
    """Everything the runtime knows about an engine; ``cut == num_layers`` means the model has no cut.

    ``dtype`` is the activations' and that of weights which are no matrices; ``weight_dtype``, a key of
    ``WEIGHT_BYTES`` (``kvforge.number_formats``), is that of linear layers. ``owner_of_layer[i]`` is the layer whose
    K,V cache layer i reads. ``kv_dtype`` is a key of ``KV_FORMATS``;
    ``kv_scales`` holds (k_scale, v_scale) of each owner where it is static, else nothing. Limits: ``max_num_seqs``
    sequences and ``max_num_tokens`` packed tokens a step, ``max_seq_len`` tokens a sequence, ``max_draft_len``
    draft tokens of a sequence in one step; above 0 the engine has the graph ``verify``. With ``early_exit`` it has the
    graph ``early_exit``, whose head is counted in ``num_parameters``. ``kv_policy`` and all of its parameters say what
    becomes of K,V once a prompt is computed (``kvforge.kv_policies``). ``isa`` names the machine code: the architecture
    followed by the extensions it needs.
    """

    schema_version: int
    kvforge_version: str
    target: str
    isa: tuple[str, ...]
    torch_version: str
    dtype: str
    weight_dtype: str
    kv_dtype: str
    kv_scales: tuple[tuple[float, float], ...]
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    layer_windows: tuple[int, ...]
    cut: int
    owner_of_layer: tuple[int, ...]
    early_exit: bool
    page_size: int
    max_num_seqs: int
    max_num_tokens: int
    max_seq_len: int
    max_draft_len: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    weights_file_bytes: int
    checkpoint_sha256: str
    operators: dict[str, int]
    files: dict[str, str]
    """SHA-256 of every file the engine was written with, by relative path; ``inspect --verify`` checks all."""
    kv_policy: str = Full.name
    kv_policy_parameters: dict[str, int] = field(default_factory=dict)

    @property
    def policy(self) -> KVPolicy:
        """The KV policy; raises BuildError for one that is none."""
        return load(self.kv_policy, self.kv_policy_parameters)

    @property
    def graphs(self) -> tuple[str, ...]:
        """The names of the engine's graphs."""
        return graph_names(self.max_draft_len, self.early_exit)

    @property
    def upper_pools(self) -> slice:
        """Which of the owners' pools, in order, the upper graph reads."""
        return slice(sum(owner < self.cut for owner in self.owners), None)

    @property
    def owners(self) -> tuple[int, ...]:
        """Layers that have a K,V cache, ascending."""
        return tuple(sorted(set(self.owner_of_layer)))

    @property
    def num_owners(self) -> int:
        """Number of layers that have a K,V cache."""
        return len(self.owners)

    @property
    def kv_format(self) -> KVFormat:
        """What ``kv_dtype`` says of the cache."""
        return KV_FORMATS[self.kv_dtype]

    @property
    def owner_cache(self) -> OwnerCache:
        """The cache of one owner."""
        scale_bytes = SCALE_BYTES if self.kv_format.scales == "dynamic" else 0
        return OwnerCache(self.num_kv_heads, self.head_dim, self.page_size, self.kv_format.element_bytes, scale_bytes)

    @property
    def kv_element_bytes_per_token(self) -> int:
        """Bytes of K and V one token keeps over all owners, without scales."""
        return 2 * self.num_owners * self.num_kv_heads * self.head_dim * self.kv_format.element_bytes

    @property
    def kv_scale_bytes_per_token(self) -> int:
        """Bytes of the dynamic scales of one token over all owners."""
        return 2 * self.num_owners * self.num_kv_heads * SCALE_BYTES if self.kv_format.scales == "dynamic" else 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes one token keeps in the cache over all owners: K, V and their scales."""
        return self.kv_element_bytes_per_token + self.kv_scale_bytes_per_token

    @property
    def page_bytes(self) -> int:
        """Bytes of one logical page over all owners."""
        return self.page_size * self.kv_bytes_per_token

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads: every linear layer and the head, without biases and scales, the
        lookup of embeddings and an early exit's head."""
        q_dim, kv_dim = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        of_layer = 2 * self.hidden_size * q_dim + 3 * self.hidden_size * self.intermediate_size
        of_owner = 2 * self.hidden_size * kv_dim
        head = self.vocab_size * self.hidden_size
        return (self.num_layers * of_layer + self.num_owners * of_owner + head) * WEIGHT_BYTES[self.weight_dtype]

    @property
    def max_num_survivors(self) -> int:
        """Tokens of one step that can go past the cut: the last of each sequence, and the drafts before it."""
        return min(self.max_num_tokens, self.max_num_seqs * (1 + self.max_draft_len))

    @property
    def sha256(self) -> str:
        """The digest in ``engine.json``, which no other engine has: it covers the digests of the engine's files."""
        return _digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON-ready data."""
        return dataclasses.asdict(self)


def save_manifest(manifest: Manifest, engine_dir: Path) -> None:
    """Write ``engine.json``."""
    data = manifest.to_json()
    data[MANIFEST_DIGEST] = _digest(data)
    (engine_dir / MANIFEST_FILE).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _digest(data: dict[str, Any]) -> str:
    """Return the SHA-256 of JSON data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def load_manifest(engine_dir: str | Path, sha256: str | None = None) -> Manifest:
    """Read and check ``engine.json`` and the engine's files: their SHA-256 and its own, and of the weights, which take
    long to read, the size alone (a graph would read beyond tensors that are too small).

    Args:
        sha256: the digest of the manifest that a server was started with, if it must be that one.

    Raises:
        EngineReplacedError: the manifest has another digest than ``sha256``.
        EngineError: no engine directory, a damaged one, or one of another schema version.
    """
    engine_dir = Path(engine_dir)
    manifest = _read_manifest(engine_dir, sha256)
    for name in manifest.files:
        if not (engine_dir / name).is_file():
            raise EngineError(f"{engine_dir} lacks {name}; rebuild the engine with kvforge build.")
        if name == WEIGHTS_FILE:
            _check_weights_size(engine_dir / name, manifest)
        else:
            _check_hash(engine_dir, name, manifest)
    return manifest


def check_not_replaced(engine_dir: str | Path, sha256: str) -> None:
    """Raise EngineReplacedError where the manifest has another digest than ``sha256``, EngineError where there is no
    sound one. Reads ``engine.json`` alone."""
    _read_manifest(Path(engine_dir), sha256)


def _read_manifest(engine_dir: Path, sha256: str | None) -> Manifest:
    path = engine_dir / MANIFEST_FILE
    if not path.is_file():
        raise EngineError(
            f"{engine_dir} is not an engine directory (no {MANIFEST_FILE}); "
            "make one with: kvforge build CHECKPOINT -o ENGINE."
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{path} is damaged ({error}); rebuild the engine with kvforge build.") from None
    if sha256 is not None and isinstance(data, dict) and data.get(MANIFEST_DIGEST) != sha256:
        raise EngineReplacedError(
            f"the engine {engine_dir.name!r} was replaced by another one while it was served; restart kvforge serve to "
            "serve the new one, or put the old one back."
        )
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise EngineError(
            f"{engine_dir} has engine schema {version}, this kvforge reads {SCHEMA_VERSION}; "
            "rebuild the engine with kvforge build."
        )
    digest = data.pop(MANIFEST_DIGEST, None)
    manifest = _manifest_from(data, path)
    if digest != _digest(data):
        raise _changed(path)
    return manifest


def _check_weights_size(path: Path, manifest: Manifest) -> None:
    """Raise EngineError unless the safetensors file has the size it was written with."""
    if path.stat().st_size != manifest.weights_file_bytes:
        raise EngineError(f"{path} is damaged or another engine's; rebuild the engine with kvforge build.")


def _check_hash(engine_dir: Path, name: str, manifest: Manifest) -> None:
    if sha256_of(engine_dir / name) != manifest.files[name]:
        raise _changed(engine_dir / name)


def _changed(path: Path) -> EngineError:
    return EngineError(f"{path} was changed or damaged after the build; rebuild the engine with kvforge build.")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content as hexadecimal text."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def verify_files(engine_dir: Path, manifest: Manifest) -> None:
    """Compare every file with the SHA-256 recorded at build time; raises EngineError naming the first that differs."""
    for name in manifest.files:
        _check_hash(engine_dir, name, manifest)


def _manifest_from(data: dict[str, Any], path: Path) -> Manifest:
    fields = {field.name: field for field in dataclasses.fields(Manifest)}
    missing, unknown = fields.keys() - data.keys(), data.keys() - fields.keys()
    if missing or unknown:
        what = f"lacks {sorted(missing)[0]}" if missing else f"has the unknown field {sorted(unknown)[0]}"
        raise EngineError(f"{path} {what}; rebuild the engine with kvforge build.")
    tuples = {
        name: tuple(tuple(item) if isinstance(item, list) else item for item in data[name])
        for name, field in fields.items()
        if str(field.type).startswith("tuple") and isinstance(data[name], list)
    }
    manifest = Manifest(**{**data, **tuples})
    if not is_possible(manifest):
        raise EngineError(f"{path} holds impossible values; rebuild the engine with kvforge build.")
    return manifest
