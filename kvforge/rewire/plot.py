"""The similarity of the layers' inputs as a figure (arXiv 2410.03960, Figure 2 left)."""

import io
from pathlib import Path

from torch import Tensor

from kvforge.errors import KvforgeError, MissingToolError
from kvforge.rewire.similarity import similarity_to_remaining

_FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raise KvforgeError, before any work is done, where a figure cannot be made."""
    if path.suffix.lower() not in _FORMATS:
        raise KvforgeError(f"{path} cannot be plotted to; name a .png, .svg or .pdf.")
    if not path.parent.is_dir():
        raise KvforgeError(f"{path} cannot be plotted to: there is no directory {path.parent}.")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise MissingToolError("--plot needs matplotlib: pip install -e '.[perf]'.") from None


def plot_similarity(similarity: Tensor, cut: int, title: str, path: Path) -> None:
    """Write each layer's mean similarity to the remaining layers, and that of every pair ``[layers, layers]``."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
    curve = [value for value in similarity_to_remaining(similarity) if value is not None]
    left.plot(range(len(curve)), curve, marker="o")
    left.axvline(cut, color="grey", linestyle="--", label=f"cut {cut}")
    left.set(xlabel="layer", ylabel="mean similarity to the remaining layers", ylim=(min(0, *curve), 1))
    left.grid(alpha=0.3)
    left.legend()
    image = right.imshow(similarity.numpy(), vmin=min(0.0, float(similarity.min())), vmax=1, origin="lower")
    right.set(xlabel="layer", ylabel="layer", title="every pair")
    figure.colorbar(image, ax=right, label="mean cosine")
    figure.suptitle(f"{title}: similarity of the inputs of layers")
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "kvforge"}):
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(buffer, format=path.suffix.lower().lstrip("."), dpi=110, metadata=metadata)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_bytes(buffer.getvalue())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
