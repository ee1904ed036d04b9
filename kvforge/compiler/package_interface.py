"""The half of a package's C++ that is the same for every graph, torch's C interface: compiled once on a machine.

Inductor writes it before a graph's own code, and most of the time that a small package took was its: it brings in the
standard library's regular expressions. Of the graph it names the class alone, which torch declares; the members that
torch defines are compiled with it.
"""

import contextlib
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
    """The objects of a build's interfaces: kept by earlier builds, or made in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[Path, Path] = {}  # by where they will be kept

    def object_of(self, text: str, command: Sequence[str], source: str, target: str) -> tuple[Path, list[str] | None]:
        """Return the object of an interface, and the command that makes it where neither this build nor another has.
        ``command`` compiles the whole ``source`` to ``target``."""
        own = self._folder / f"interface-{len(self._made)}.cpp"
        own.write_text(text, encoding="utf-8")
        kept = object_path(cache_dir(), own, (), [*_flags(command), *cpu_isa()], compiler_version())
        if kept in self._made:
            return self._made[kept], None
        with contextlib.suppress(OSError):  # none, or a cache that this user may only read
            mark_used(kept)
        if kept.is_file():
            return kept, None
        made = self._made[kept] = own.with_suffix(".o")
        return made, [{source: str(own), target: str(made)}.get(word, word) for word in command]

    def keep(self) -> None:
        """Put what was made into the cache; one that cannot be written is none."""
        for kept, made in self._made.items():
            with contextlib.suppress(OSError):
                write_kept(kept, made.read_bytes())


def _flags(command: Sequence[str]) -> list[str]:
    """The options that decide what is compiled; folders and the name of a header of torch's do not."""
    return [word for word in command if word.startswith("-") and not word.startswith("-I")]
