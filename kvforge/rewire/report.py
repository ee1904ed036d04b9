"""A summary as text."""

from kvforge.common.text_table import align
from kvforge.rewire.convert import RewireSummary


def describe(summary: RewireSummary) -> str:
    """Return candidates, owners and states as tables, where there are some, and one line of what was written."""
    blocks = []
    if summary.candidates:
        rows = [["cut", "prefill reduction", "mean similarity", "mean residual", "worst residual"]]
        for item in summary.candidates:
            similarity = "-" if item.mean_similarity is None else f"{item.mean_similarity:.3f}"
            chosen = " *" if item.cut == summary.cut else "  "
            residuals = [f"{item.mean_residual:.4f}", f"{item.worst_residual:.4f}"]
            rows.append([f"{item.cut}{chosen}", f"{100 * item.prefill_reduction:.1f}%", similarity, *residuals])
        title = "Cuts by what their input explains of K, V and updates of states above them (* chosen)"
        blocks.append(f"{title}\n{align(rows)}")
    if summary.owners:
        rows = [["owner", "layers", "K", "V", "K, fold", "V, fold", "K, each layer", "V, each layer"]]
        for fit in summary.owners:
            last = f"-{fit.layers[-1]}" if len(fit.layers) > 1 else ""
            shares = (fit.k, fit.v, fit.fold_k, fit.fold_v, fit.layers_k, fit.layers_v)
            rows.append([f"{fit.owner}", f"{fit.layers[0]}{last}", *(f"{share:.4f}" for share in shares)])
        title = "Unexplained share of the teacher's K and V on held-out text (0 = perfect, 1 = nothing explained)"
        blocks.append(f"{title}\n{align(rows)}")
    if summary.states:
        parts = list(summary.states[0].shares)
        rows = [["layer", *parts, *(f"{part}, fold" for part in parts)]]
        for each in summary.states:
            missed = [found[part] for found in (each.shares, each.fold) for part in parts]
            rows.append([f"{each.layer}", *(f"{share:.4f}" for share in missed)])
        blocks.append(f"Unexplained share of what updates the teacher's states\n{align(rows)}")
    reduction = 100 * (1 - summary.cut / summary.num_layers)
    kind = f"blind but for {summary.num_anchors} anchors" if summary.num_anchors else f"init {summary.init}"
    blocks.append(
        f"{summary.output}: {summary.model_type}, cut {summary.cut} of {summary.num_layers} layers "
        f"({reduction:.1f}% less prefill), groups of {summary.group_size}, {kind}, "
        f"{summary.new_parameters / 1e6:.1f}M new parameters, {summary.weight_bytes / 1e6:.1f} MB of weights "
        f"{'with' if summary.with_teacher else 'without'} the teacher's q, k and v"
        + (", an early-exit head" if summary.early_exit else "")
    )
    return "\n\n".join(blocks)
