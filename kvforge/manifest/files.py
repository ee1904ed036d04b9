"""Reading and writing an engine directory's manifest, and checking its files against it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from kvforge.common.checkpoint_files import CONFIG, is_gguf
from kvforge.common.errors import EngineError, EngineReplacedError
from kvforge.common.records import IMPOSSIBLE, RecordError, read_record
from kvforge.manifest.check import is_possible
from kvforge.manifest.manifest import PLANS_FILE, SCHEMA_VERSION, WEIGHTS_FILE, Manifest, digest_of

MANIFEST_FILE = "engine.json"
MANIFEST_DIGEST = "manifest_sha256"
"""The key of ``engine.json`` that holds the SHA-256 of all the others: graphs are compiled for what they say."""


def save_manifest(manifest: Manifest, engine_dir: Path) -> None:
    """Write ``engine.json``."""
    data = manifest.to_json()
    data[MANIFEST_DIGEST] = digest_of(data)
    (engine_dir / MANIFEST_FILE).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


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
            if (path := engine_dir / name).stat().st_size != manifest.weights_file_bytes:
                raise EngineError(f"{path} is damaged or another engine's; rebuild the engine with kvforge build.")
        else:
            _check_hash(engine_dir, name, manifest)
    return manifest


def check_not_replaced(engine_dir: str | Path, sha256: str) -> None:
    """Raise EngineReplacedError where the manifest has another digest than ``sha256``, EngineError where there is no
    sound one. Reads ``engine.json`` alone."""
    _read_manifest(Path(engine_dir), sha256)


def target_of(engine_dir: str | Path) -> str:
    """Return an engine's target, from ``engine.json`` alone. Raises EngineError where there is no sound one."""
    return _read_manifest(Path(engine_dir), None).target


def _read_manifest(engine_dir: Path, sha256: str | None) -> Manifest:
    path = engine_dir / MANIFEST_FILE
    try:
        str(path).encode()
    except UnicodeEncodeError:  # which the libraries that read an engine's files cannot open
        raise EngineError(f"the path {str(engine_dir)!r} is not UTF-8 text; rename the engine's directory.") from None
    if not path.is_file():
        if (engine_dir / CONFIG).is_file() or is_gguf(engine_dir):
            raise EngineError(
                f"{engine_dir} is not an engine directory but a checkpoint; make one of it with: kvforge build "
                f"{engine_dir} -o ENGINE. kvforge serve and kvforge.LLM take it as it is."
            )
        found = f"no {MANIFEST_FILE}" if engine_dir.exists() else "there is nothing of this name"
        raise EngineError(
            f"{engine_dir} is not an engine directory ({found}); make one with: kvforge build CHECKPOINT -o ENGINE."
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
    if digest != digest_of(data):
        raise _changed(path)
    return manifest


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


def load_plans(engine_dir: Path, manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Return what the builder said of each graph's plan: ``plan_bytes``, and where it said more ``weight_bytes``,
    ``activation_bytes``, ``persistent_bytes`` and the number of ``layers`` of each kind. Nothing without plans."""
    if PLANS_FILE not in manifest.files:
        return {}
    return json.loads((engine_dir / PLANS_FILE).read_text(encoding="utf-8"))


def _manifest_from(data: dict[str, Any], path: Path) -> Manifest:
    try:
        manifest = read_record(Manifest, data)
        if not is_possible(manifest):
            raise RecordError(IMPOSSIBLE)
    except RecordError as error:
        raise EngineError(f"{path} {error}; rebuild the engine with kvforge build.") from None
    return manifest
