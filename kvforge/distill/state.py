"""The state of a run on disk: whole or not there, and only continued by the run that it belongs to."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvforge.common.errors import KvforgeError, first_line
from kvforge.common.number_formats import whole_name
from kvforge.distill import world

STATE_FILE = "state.pt"
_HASHED = {
    "data": "other data, or another --mask, --overlong or --length",
    "teacher": "another teacher",
    "source": "another checkpoint to start from",
    "fit": "maps of another fit: another --ridge, --calibration, --num-samples or --num-tokens",
}
"""What differs where a state's identity holds a hash."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter besides the number of steps."""


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` beside ``path`` and rename it, so that an interrupted write leaves the last one.

    Raises:
        KvforgeError: it cannot be written; what was there stays.
    """
    unfinished = path.with_suffix(".unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer hides what stopped it behind a RuntimeError
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else first_line(error)
        kept = "the state before it is kept" if path.exists() else "there is none before it"
        raise KvforgeError(
            f"The training state {path} cannot be written ({reason}); {kept}: free space there and give the same "
            "command again."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def load_state(path: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the saved state, or None where there is none.

    Raises:
        KvforgeError: it is not readable, or of a run whose ``identity`` differs.
    """
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        saved = dict(state["identity"])
        saved["dtype"] = whole_name(saved["dtype"])  # earlier versions wrote the short ones
    except Exception as error:  # zip, pickle and key errors of a damaged file
        raise KvforgeError(
            f"{path} is not a readable training state ({first_line(error)}); remove it to start again."
        ) from None
    for name in sorted({*saved, *identity}):
        if saved.get(name) != identity.get(name):
            what = f"{name} {saved.get(name)!r}, and this one has {identity.get(name)!r}"
            raise KvforgeError(
                f"{path.parent} holds a run with {_HASHED.get(name, what)}; give that run's options, data and model "
                "to continue it, or another --work to start a new one."
            )
    return dict(state)


def save_run(
    folder: Path,
    trained: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    identity: Mapping[str, Any],
    progress: Any,
) -> None:
    """Write the state of a run into ``folder``: weights, moments, what it belongs to, and its ``progress``, a
    dataclass; all processes call this together. Raises KvforgeError as ``save_state`` does."""
    state = collect(trained, optimizer)
    state |= {"identity": identity, "progress": dataclasses.asdict(progress)}
    world.first_process(lambda: save_state(folder / STATE_FILE, state))


def collect(trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return whole CPU copies of the trained weights and their moments, in process 0; all processes call this
    together."""
    weights: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for name, parameter in trained.items():
        weight = world.gathered(parameter)
        kept = {key: world.gathered(optimizer.state[parameter][key]) for key in MOMENTS}
        if world.rank() == 0:
            weights[name], moments[name] = weight, kept
    return {"weights": weights, "optimizer": moments}


def restore(
    trained: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, state: Mapping[str, Any] | None, step: int
) -> None:
    """Overwrite weights and optimizer with those of process 0's ``state``, saved after ``step`` steps. All processes
    call this together."""
    for name, parameter in trained.items():
        world.assign(parameter, None if state is None else state["weights"][name])
        kept = optimizer.state[parameter]
        kept["step"] = torch.full((), step, dtype=torch.float32, device=parameter.device)
        for key in MOMENTS:
            kept[key] = torch.zeros_like(parameter, requires_grad=False)
            world.assign(kept[key], None if state is None else state["optimizer"][name][key])
