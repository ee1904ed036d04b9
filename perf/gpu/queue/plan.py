"""What a quarter of an hour holds: which experiments run, in which minute, and which are left for another time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perf.gpu.carry.pieces import is_carried
from perf.gpu.queue.experiment import Experiment
from perf.gpu.queue.results import DONE, RESULTS, State, commit_of, record_path, state_of
from perf.harness.tables import text_table


@dataclass(frozen=True)
class Planned:
    """An experiment, its result's state, and the second at which it begins; None where it does not, ``why`` says."""

    experiment: Experiment
    state: State
    start_s: float | None
    why: str = ""


def plan(
    experiments: Sequence[Experiment],
    seconds: float,
    folder: Path = RESULTS,
    carried: Path | None = None,
    again: bool = False,
    carry_later: bool = False,
) -> list[Planned]:
    """Return all experiments in their order. Those without a current result begin one after the other, as long as
    ``seconds`` hold them; ``again`` runs those that have one, too. ``carried``: what was brought along lies there;
    with ``carry_later`` all of it will be."""
    planned, clock = [], 0.0
    for experiment in experiments:
        state = state_of(experiment, folder)
        missing = [name for name in experiment.carried if not (carry_later or is_carried(carried, name))]
        if state.kind == DONE and not again:
            planned.append(Planned(experiment, state, None, "has a result"))
        elif missing:
            planned.append(Planned(experiment, state, None, f"needs {', '.join(missing)} in --carried"))
        elif clock + experiment.seconds > seconds:
            planned.append(Planned(experiment, state, None, "no time left"))
        else:
            planned.append(Planned(experiment, state, clock))
            clock += experiment.seconds
    return planned


def minute(start_s: float | None) -> str:
    """Return a time as minutes and seconds."""
    return "" if start_s is None else f"{int(start_s) // 60}:{int(start_s) % 60:02d}"


def told_state(entry: Planned, folder: Path = RESULTS) -> str:
    """Return the state in words, with the commit that has the result, and a later failure."""
    text = entry.state.kind
    if entry.state.record is not None:
        commit = commit_of(record_path(folder, entry.experiment.name))
        text += f" at {commit}" if commit else ", not committed"
    return text + (", failed since" if entry.state.failure is not None else "")


def plan_table(planned: Sequence[Planned], folder: Path = RESULTS) -> str:
    """Return the plan as text."""
    rows = [
        {
            "at": minute(entry.start_s),
            "name": entry.experiment.name,
            "seconds": f"{entry.experiment.seconds}{'' if entry.experiment.measured else ' (estimate)'}",
            "state": told_state(entry, folder),
            "why": entry.why or entry.experiment.question,
        }
        for entry in planned
    ]
    widths = {key: max([len(key), *(len(row[key]) for row in rows)]) for key in ("name", "seconds", "state")}
    columns = (
        ("at", "at", ">5"),
        *((key, key, f"<{width}") for key, width in widths.items()),
        ("", "why", "<"),
    )
    return text_table(columns, rows, gap="  ")
