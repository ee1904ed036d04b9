"""Figures through matplotlib, written whole or not at all."""

import collections
import contextlib
import hashlib
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

from kvforge.common.errors import KvforgeError, first_line
from kvforge.common.extras import import_failed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_FORMATS = (".png", ".svg", ".pdf")

_STYLED = re.compile(rb'(<[^<>]*?) style="([^"]*)"')
"""A tag up to its style, and the style; what a text says is none."""


def check_figure(path: Path) -> None:
    """Raise KvforgeError, before any work is done, where a figure cannot be made, MissingToolError without
    matplotlib."""
    if path.suffix.lower() not in _FORMATS:
        raise KvforgeError(f"{path} cannot be plotted to; name a .png, .svg or .pdf.")
    if not path.parent.is_dir():
        raise KvforgeError(f"{path} cannot be plotted to: there is no directory {path.parent}.")
    new_figure(1, 1)


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure, in inches, that needs no display. Raises MissingToolError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except Exception as error:
        raise import_failed("Plots need matplotlib", "perf", error) from None
    return Figure(figsize=(width, height), layout="constrained")


def compact_svg(data: bytes) -> bytes:
    """The same drawing of matplotlib's without metadata, indentation, breaks in the data of paths, names of groups,
    turns by nothing, and the fonts between the first and the last that a text may have; a style that several elements
    have is a class."""
    data = re.sub(rb" <metadata>.*?</metadata>\n", b"", data, flags=re.DOTALL)
    data = re.sub(rb"(font-family: '[^']*'), [^;\"]*(sans-serif)", rb"\1, \2", data)
    data = re.sub(rb' transform="rotate\(-0 [^)]*\)"', b"", data)
    data = re.sub(rb'<g id="[^"]*"', b"<g", data)
    data = re.sub(rb' d="([^"]*)"', lambda found: b' d="%b"' % re.sub(rb"\s*([A-Za-z])\s*", rb"\1", found[1]), data)
    data = re.sub(rb"\n +<", b"\n<", data)
    styles = collections.Counter(style for _, style in _STYLED.findall(data))
    often = [style for style, count in styles.items() if count > 2]
    prefix = hashlib.sha256(b"".join(often)).hexdigest()[:4]  # figures of one page share their classes' names
    names = {style: f"s{prefix}-{index}".encode() for index, style in enumerate(often)}

    def with_class(found: re.Match[bytes]) -> bytes:
        tag, style = found.groups()
        return b'%b class="%b"' % (tag, names[style]) if style in names else found[0]

    rules = b"".join(b".%b{%b}" % (name, style) for style, name in names.items())
    return _STYLED.sub(with_class, data).replace(b"</style>", rules + b"</style>", 1)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write ``figure`` in the format that the name of ``path`` says; what is there before stays until it is done. The
    same figure gives the same SVG.

    Raises:
        KvforgeError: matplotlib does not write this kind of file, or it cannot be written there.
    """
    import matplotlib

    image, kind = io.BytesIO(), path.suffix.lower().lstrip(".") or "png"
    try:
        with matplotlib.rc_context({"svg.hashsalt": "kvforge", "svg.fonttype": "none"}):
            figure.savefig(image, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else None)
    except ValueError as error:
        raise KvforgeError(f"{path} cannot be plotted to ({first_line(error)}); name a .png, .svg or .pdf.") from None
    data = compact_svg(image.getvalue()) if kind == "svg" else image.getvalue()
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    except OSError as error:
        raise KvforgeError(
            f"{path} cannot be written ({error.strerror}); choose another place or free space."
        ) from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
