"""Reading training data row by row: lines of a .jsonl file, or rows of a Hugging Face dataset."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from kvforge.common.errors import KvforgeError, first_line
from kvforge.common.extras import import_failed


class Row(NamedTuple):
    """An object of the data and the words that name its place in messages, ``data.jsonl, line 3``."""

    where: str
    values: dict[str, Any]


def read_lines(path: Path, show_progress: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 file with their numbers from 1, streamed. Raises KvforgeError with the line number
    where the file is not UTF-8, or with the path where it cannot be opened."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise KvforgeError(f"The data file {path} cannot be read ({error.strerror}); check the path.") from None
    with (
        file,
        tqdm(
            total=os.fstat(file.fileno()).st_size,
            desc=f"Reading {path.name}",
            unit="B",
            unit_scale=True,
            leave=False,
            disable=not show_progress,
        ) as bar,
    ):
        for number, line in enumerate(file, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise KvforgeError(
                    f"{path}, line {number}: byte {error.start + 1} is not UTF-8; save the file as UTF-8."
                ) from None
            bar.update(len(line))


def read_jsonl(path: Path, show_progress: bool = False) -> Iterator[Row]:
    """Yield the objects of a .jsonl file; blank lines are passed over. Raises KvforgeError with the line number."""
    for number, line in read_lines(path, show_progress):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise KvforgeError(f"{where}: not JSON ({first_line(error)}); give one object on each line.") from None
        if not isinstance(values, dict):
            raise KvforgeError(f"{where}: a {type(values).__name__} and not an object; give one object on each line.")
        yield Row(where, values)


def read_dataset(source: str, show_progress: bool = False) -> Iterator[Row]:
    """Yield the rows of a folder made by ``Dataset.save_to_disk``, or of ``NAME[:[CONFIG:]SPLIT]`` (split ``train``)
    on the Hugging Face hub or in its cache. Raises KvforgeError where it cannot be loaded."""
    try:
        import datasets
    except Exception as error:
        need = f"{source} is no .jsonl or .txt file, and a data set needs the package datasets"
        raise import_failed(need, "train", error) from None
    name, *parts = source.split(":")
    split = parts[-1] if parts else "train"
    config = parts[0] if len(parts) > 1 else None
    library_bars = datasets.is_progress_bar_enabled()
    if not show_progress:
        datasets.disable_progress_bars()
    try:
        if any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json")):
            rows = datasets.load_from_disk(name)
            if isinstance(rows, dict):
                if split not in rows:
                    raise LookupError(f"no split {split!r}, it has {', '.join(rows)}")
                rows = rows[split]
        else:
            rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the library raises what its file systems and parsers raise
        raise KvforgeError(
            f"The data {source} cannot be loaded as a dataset ({first_line(error)}); give a .jsonl or .txt file, a "
            "folder of Dataset.save_to_disk, or NAME:SPLIT of a Hugging Face dataset."
        ) from None
    finally:
        if library_bars:
            datasets.enable_progress_bars()
    for number, values in enumerate(
        tqdm(rows, desc=f"Reading {name}", unit="row", leave=False, disable=not show_progress)
    ):
        yield Row(f"{name}, row {number}", dict(values))
