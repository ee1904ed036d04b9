"""A model in one GGUF file, or in several that are called ``NAME-00001-of-0000N.gguf``."""

import re
import reprlib
from pathlib import Path
from typing import Any

from kvforge.checkpoint.gguf.header import Header, read_header
from kvforge.common.errors import CheckpointError

_NAME = re.compile(r"(?P<name>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")


def read_parts(path: Path) -> Header:
    """Return the head of the first file with the tensors of all.

    Raises:
        CheckpointError: as ``read_header`` does; ``path`` is another part than the first, a part is missing or of
            another model, or parts are not named as such.
    """
    first = read_header(path)
    count = _number(first, "split.count", 1)
    if count <= 1:
        return first
    found = _NAME.fullmatch(path.name)
    if found is None or int(found["parts"]) != count:
        raise CheckpointError(
            f"{path} is one of {count} parts of a model and not called NAME-00001-of-{count:05d}.gguf; give the files "
            "their names back."
        )
    names = [path.with_name(f"{found['name']}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]
    if _number(first, "split.no", 0) != 0 or int(found["part"]) != 1:
        raise CheckpointError(f"{path} is not the first of {count} parts; give {names[0]}.")
    headers = [first]
    for number, name in enumerate(names[1:], 1):
        if not name.is_file():
            raise CheckpointError(f"{name}, part {number + 1} of {count} of {path}, is missing; download it too.")
        header = read_header(name)
        if (_number(header, "split.no", 0), _number(header, "split.count", 1)) != (number, count):
            raise CheckpointError(f"{name} is not part {number + 1} of the {count} of {path}; download it again.")
        headers.append(header)
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    total = _number(first, "split.tensors.count", len(tensors))
    if len({tensor.name for tensor in tensors}) != total or len(tensors) != total:
        raise CheckpointError(
            f"The {count} parts of {path} have {len(tensors)} tensors in place of {total}; they are not of one model."
        )
    return Header(path, first.metadata, tensors)


def _number(header: Header, key: str, otherwise: int) -> int:
    value: Any = header.metadata.get(key, otherwise)
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"{header.path} has {reprlib.repr(value)} as {key}; it must be a whole number.")
    return value
