"""All results as one file: from a machine that is lent few files come back."""

import os
import zipfile
from pathlib import Path

from kvforge.common.errors import KvforgeError

BUNDLE = "quarter.zip"


def write_bundle(path: Path, folder: Path) -> None:
    """Write all records and logs of ``folder`` to a zip file, which is never seen in part."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    with zipfile.ZipFile(hidden, "w", zipfile.ZIP_DEFLATED) as bundle:
        for file in sorted(folder.iterdir()):
            if file.suffix in (".json", ".log") and not file.name.startswith("."):
                bundle.write(file, file.name)
    hidden.replace(path)


def take_bundle(path: Path, folder: Path) -> list[str]:
    """Unpack a bundle's records and logs into ``folder``; returns their names.

    Raises:
        KvforgeError: it is no bundle, or it has other files than records and logs.
    """
    try:
        with zipfile.ZipFile(path) as bundle:
            names = bundle.namelist()
            if odd := [name for name in names if "/" in name or not name.endswith((".json", ".log"))]:
                raise KvforgeError(f"{path} has {odd[0]}, which is no result; give the {BUNDLE} of a queue's --out.")
            folder.mkdir(parents=True, exist_ok=True)
            for name in names:
                (folder / name).write_bytes(bundle.read(name))
    except (OSError, zipfile.BadZipFile) as error:
        raise KvforgeError(f"{path} cannot be read ({error}); give the {BUNDLE} of a queue's --out.") from None
    return names
