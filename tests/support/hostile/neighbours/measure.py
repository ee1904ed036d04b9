"""An attack beside neighbours: what became of it, and of them."""

import time
from dataclasses import asdict, dataclass
from typing import Any

from tests.support.hostile.neighbours.attacks import Attack, Doors
from tests.support.hostile.neighbours.streams import Neighbours

AFTER = 3
"""Pieces that each neighbour must get after the attack has its answer."""
AFTER_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Outcome:
    """`gap_s`: the longest that a neighbour waited for its next piece, at `door`; `pieces`: what the one with the
    fewest got in the `seconds` of the attack."""

    kind: str
    name: str
    answer: str
    seconds: float
    pieces: int
    gap_s: float
    door: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"answer": self.answer[:60]}


def idle(neighbours: Neighbours, seconds: float) -> Outcome:
    """Nobody attacks."""
    started = time.monotonic()
    time.sleep(seconds)
    return _outcome(neighbours, "idle", "nobody attacks", "", started)


def attacked(neighbours: Neighbours, attack: Attack, doors: Doors) -> Outcome:
    """Raises AssertionError where neighbours get nothing more afterwards, or attackers no answer."""
    started = time.monotonic()
    answer = attack.run(doors)
    assert neighbours.wait_for(AFTER, AFTER_TIMEOUT_S), f"{attack.name}: a neighbour got nothing more"
    return _outcome(neighbours, attack.kind, attack.name, answer, started)


def _outcome(neighbours: Neighbours, kind: str, name: str, answer: str, started: float) -> Outcome:
    ended = time.monotonic()
    pieces = neighbours.fewest(started, ended)
    return Outcome(kind, name, answer, ended - started, pieces, *neighbours.longest_gap(started, ended))
