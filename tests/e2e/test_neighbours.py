"""No request stops, stalls or starves its neighbours: streams at every door go on while one client attacks."""

from collections.abc import Iterator

import pytest

from kvforge.serving.server.launcher import TritonServer
from tests.support.hostile.neighbours.attacks import Attack, Doors, known_attacks, random_attack
from tests.support.hostile.neighbours.measure import attacked, idle
from tests.support.hostile.neighbours.streams import Neighbours
from tests.support.serving.gateway_process import run_gateway

QUICK, FULL = 12, 220
SHARE = 0.02
"""Of the pieces that neighbours get with nobody attacking, in the same time, what the one with the fewest must get: it
shares two cores with the attack, and batches with up to 128 sequences of it."""


@pytest.fixture(scope="module")
def doors(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    with run_gateway(server, tmp_path_factory.mktemp("neighbours")) as gateway:
        yield Doors(server.grpc_url, gateway.url)


def attacks(full: bool) -> list[Attack]:
    if full:
        return [*known_attacks(), *map(random_attack, range(FULL))]
    return [*known_attacks(answer_tokens=100), *map(random_attack, range(QUICK))]


@pytest.mark.timeout(3000)
def test_neighbours_go_on(server: TritonServer, doors: Doors, full: bool) -> None:
    state = server.state
    assert state is not None
    with Neighbours(doors.grpc_url, doors.gateway_url) as neighbours:
        quiet = idle(neighbours, 3.0)
        rate = quiet.pieces / quiet.seconds
        for attack in attacks(full):
            outcome = attacked(neighbours, attack, doors)
            assert outcome.answer, attack.name
            assert outcome.pieces >= min(rate * outcome.seconds * SHARE, outcome.seconds), outcome
        assert not neighbours.errors
        assert len(attacks(full)) >= 30
    after = server.state
    assert after is not None and after.engine_pid == state.engine_pid, "the engine process was replaced"


def test_a_gap_is_seen(doors: Doors) -> None:
    """What stands still between two pieces is the longest gap."""
    with Neighbours(doors.grpc_url, doors.gateway_url) as neighbours:
        one = neighbours.all[0]
        assert one.longest_gap(one.pieces[0] - 5.0, one.pieces[0]) == pytest.approx(5.0)
        assert one.num_between(one.pieces[0] - 1.0, one.pieces[0]) == 1
    pieces = len(one.pieces)
    assert one.num_between(0.0, one.pieces[-1]) == pieces
