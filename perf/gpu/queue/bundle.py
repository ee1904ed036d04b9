"""All results as one file: from a machine that is lent few files come back."""

import json
import zipfile
import zlib
from pathlib import Path

from kvforge.common.errors import KvforgeError
from perf.gpu.queue.experiments import EXPERIMENTS
from perf.gpu.queue.results import DONE, appearing_whole, is_record, state_of, write_whole

BUNDLE = "quarter.zip"


def write_bundle(path: Path, folder: Path) -> None:
    """Write all records and logs of ``folder`` to a zip file, which is never seen in part."""
    with (
        appearing_whole(path) as hidden,
        zipfile.ZipFile(hidden, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as bundle,
    ):
        for file in sorted(folder.iterdir()):
            if file.suffix in (".json", ".log") and not file.name.startswith("."):
                bundle.write(file, file.name)


def take_bundle(path: Path, folder: Path) -> list[str]:
    """Unpack a bundle's records and logs into ``folder``; returns their names. What belongs to an experiment with a
    current result in ``folder`` stays out, unless the bundle's is current, too.

    Raises:
        KvforgeError: it is no bundle, it has other files than records and logs, or they cannot be written.
    """
    try:
        with zipfile.ZipFile(path) as bundle:
            files = {name: bundle.read(name) for name in bundle.namelist()}
    except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        raise KvforgeError(f"{path} cannot be read ({error}); give the {BUNDLE} of a queue's --out.") from None
    if odd := [name for name, content in files.items() if not _is_result(name, content)]:
        raise KvforgeError(f"{path} has {odd[0]}, which is no result; give the {BUNDLE} of a queue's --out.")
    kept = [name for name in files if not _is_older(name, files, folder)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in kept:
            write_whole(folder / name, files[name])
    except OSError as error:
        raise KvforgeError(f"{folder} cannot be written ({error}); give another folder with --results.") from None
    return kept


def _is_result(name: str, content: bytes) -> bool:
    if "/" in name or name.startswith(".") or not name.endswith((".json", ".log")):
        return False
    try:
        return name.endswith(".log") or is_record(json.loads(content))
    except ValueError:
        return False


def _is_older(name: str, files: dict[str, bytes], folder: Path) -> bool:
    """Whether ``folder`` has a current result of a file's experiment, and the bundle none."""
    experiment = next((one for one in EXPERIMENTS if one.name == name.split(".")[0]), None)
    if experiment is None:
        return False
    state = state_of(experiment, folder)
    if state.kind != DONE or state.record is None:
        return False
    new = files.get(f"{experiment.name}.json")
    return new is None or json.loads(new)["sources_sha256"] != state.record["sources_sha256"]
