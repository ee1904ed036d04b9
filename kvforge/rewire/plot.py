"""The similarity of the layers' inputs as a figure (arXiv 2410.03960, Figure 2 left)."""

from pathlib import Path

from torch import Tensor

from kvforge.common.figures import new_figure, save_figure
from kvforge.rewire.similarity import similarity_to_remaining


def plot_similarity(similarity: Tensor, cut: int, title: str, path: Path) -> None:
    """Write each layer's mean similarity to the remaining layers, and that of every pair ``[layers, layers]``."""
    figure = new_figure(9.5, 4.2)
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
    save_figure(figure, path)
