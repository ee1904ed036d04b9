"""A summary as text."""

from kvforge.distill.packing import Overlong
from kvforge.prediction.run import PredictSummary


def describe(summary: PredictSummary, overlong: Overlong = "split") -> str:
    """Return what the fitted maps miss, as a table, and what was trained and written."""
    lines = [
        "Unexplained share of the base's K and V on held-out text before training (0 = perfect, 1 = nothing explained)",
        "owner  reads       K       V",
    ]
    lines += [f"{fit.owner:>5}  {fit.layer:>5}  {fit.k:.4f}  {fit.v:.4f}" for fit in summary.fits]
    if summary.data is not None:
        lines += ["", summary.data.line(overlong)]
    trained = "fitted, not trained"
    if summary.steps:
        last = summary.metrics
        trained = (
            f"{summary.steps} steps, {summary.tokens / 1e6:.2f} M tokens in {summary.seconds:.0f} s; at the last step "
            f"KL {last['kl']:.4f}, agreement {last['agreement']:.1%}, errors of K {last['k']:.3f}, V {last['v']:.3f}, "
            f"scores {last['qk']:.3f}"
        )
    return "\n".join([*lines, f"{summary.output}: {summary.parameters / 1e6:.1f}M parameters, {trained}"])
