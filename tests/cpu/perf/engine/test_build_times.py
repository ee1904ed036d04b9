"""What ``perf.engine.build`` times."""

from perf.engine.build import load_stages
from tests.support.models.engines import SWIFTKV
from tests.support.models.shelf import EngineShelf


def test_the_parts_of_a_load_are_timed_and_the_rest_is_in_the_total(engines: EngineShelf) -> None:
    seconds = load_stages(engines.engine(SWIFTKV))
    parts = [seconds.pop(name) for name in ("load_manifest", "load_weights", "load_graph", "allocate_pools")]
    assert min(parts) > 0 and seconds["total"] > sum(parts) and [*seconds] == ["total"]
