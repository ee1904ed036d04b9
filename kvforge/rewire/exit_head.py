"""An early-exit head fitted to text: the LM head on a linear map from the cut's input to the final norm's output."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvforge.common.errors import KvforgeError
from kvforge.rewire.inputs import LayerInputs
from kvforge.rewire.least_squares import InputSums, ResidualSums, solve
from kvforge.rewire.projections import normalise
from kvforge.rewire.source import PlainCheckpoint

EXIT_NORM, EXIT_HEAD = "model.norm_early_exit.weight", "lm_head_early_exit.weight"


@torch.inference_mode()
def fit_exit_map(
    source: PlainCheckpoint, inputs: LayerInputs, cut: int, ridge: float, device: torch.device | str = "cpu"
) -> Tensor:
    """Return W ``[hidden, hidden]`` float64: ridge regression of the final norm's output on the residual stream
    entering ``cut`` over its root mean square, towards diag(g), g the final norm's gain, which is the copied head.

    ``inputs`` has what enters ``cut``, and the output of the last layer.

    Raises:
        KvforgeError: ``ridge`` is too small.
    """
    config = source.config
    gain = source.checkpoint.read_raw("model.norm.weight").double().to(device) + config.norm_offset
    sums = InputSums(config.hidden_size, False, device)
    residuals = ResidualSums(config.hidden_size, config.hidden_size, device)
    for sample in inputs.fitted:
        x, output = (
            normalise(inputs.read(layer, sample).to(device), config.rms_norm_eps) for layer in (cut, config.num_layers)
        )
        sums.add(x)
        residuals.add(x, (output - x) * gain)
    try:
        factor = sums.factor(ridge)
    except torch.linalg.LinAlgError:
        raise KvforgeError(
            f"The early exit of cut {cut} cannot be fitted with --ridge {ridge:g}; give a larger one."
        ) from None
    return torch.diag(gain) + solve(sums, factor, residuals)[0]


def exit_tensors(source: PlainCheckpoint, exit_map: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return the norm, whose gain is 1, and the LM head times ``exit_map``, by tensor name."""
    config = source.config
    name = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return {
        EXIT_NORM: lambda: torch.full((config.hidden_size,), 1 - config.norm_offset),
        EXIT_HEAD: lambda: source.checkpoint.read_raw(name).float() @ exit_map.float().cpu(),
    }
