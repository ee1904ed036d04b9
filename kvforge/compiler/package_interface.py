"""The half of a package's C++ that is the same for every graph, torch's C interface: compiled once on a machine.

Inductor writes it before a graph's own code, and most of the time that a small package took was its: it brings in the
standard library's regular expressions. Of the graph it names the class alone, which torch declares; the members that
torch defines are compiled with it.
"""

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from kvforge.common.hardware import cpu_isa
from kvforge.common.kept_file import write_kept
from kvforge.compiler.aot_inductor import compiler_version
from plugins.build import cache_dir
from plugins.object_cache import mark_used, object_path

_INTERFACE = Path(torch.__file__).parent / "_inductor" / "codegen" / "aoti_runtime" / "interface.cpp"
_CLASS = "#include <torch/csrc/inductor/aoti_runtime/model.h>\n"
_MEMBERS = "template class torch::aot_inductor::AOTInductorModelBase<torch::aot_inductor::AOTInductorModel>;\n"


def halves(source: str) -> tuple[str, str] | None:
    """Return the interface and the graph of Inductor's C++, each a source of its own; None where the text is other."""
    interface = _INTERFACE.read_text(encoding="utf-8") if _INTERFACE.is_file() else ""
    before, found, graph = source.partition(interface) if interface else ("", "", "")
    return (before + found + _MEMBERS, f"{before}{_CLASS}extern {_MEMBERS}{graph}") if found else None


class Interfaces:
    """The objects of a build's interfaces, in ``folder``: copies of what earlier builds kept, or made there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._objects: dict[Path, Path] = {}  # by where they are kept
        self._made: list[Path] = []  # those of them that are to be kept

    def object_of(self, text: str, command: Sequence[str], source: str, target: str) -> tuple[Path, list[str] | None]:
        """Return the object of an interface, and the command that makes it where neither this build nor another has.
        ``command`` compiles the whole ``source`` to ``target``."""
        own = self._folder / f"interface-{len(self._objects)}.cpp"
        own.write_text(text, encoding="utf-8")
        kept = object_path(cache_dir(), own, (), [*_options(command, source, target), *cpu_isa()], compiler_version())
        if kept in self._objects:
            return self._objects[kept], None
        here = self._objects[kept] = own.with_suffix(".o")
        if _take(kept, here):
            return here, None
        self._made.append(kept)
        return here, [{source: str(own), target: str(here)}.get(word, word) for word in command]

    def keep(self) -> None:
        """Put what was made into the cache; one that cannot be written is none."""
        for kept in self._made:
            data = self._objects[kept].read_bytes()
            with contextlib.suppress(OSError):
                write_kept(kept, data + hashlib.sha256(data).digest())


def _take(kept: Path, path: Path) -> bool:
    """Whether there is such an object, whole, its digest behind it; then it is copied to ``path`` and counts as used
    now. One that cannot be read is none."""
    try:
        found = kept.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    if hashlib.sha256(found[:-size]).digest() != found[-size:]:
        return False
    path.write_bytes(found[:-size])
    with contextlib.suppress(OSError):  # a cache that this user may only read
        mark_used(kept)
    return True


def _options(command: Sequence[str], source: str, target: str) -> list[str]:
    """What decides what is compiled; the names of files and of folders do not, nor that of a header of torch's."""
    words = zip(command, ["", *command], strict=False)
    named = {source, target}
    return [word for word, before in words if not (word in named or word.startswith("-I") or before == "-include")]
