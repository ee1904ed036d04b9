"""Python's collector of cycles is off inside, and afterwards as it was."""

import gc
from collections.abc import Iterator

import pytest

from kvforge.common.collector import without_collector


@pytest.fixture(autouse=True)
def on_again() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_as_before(was_on: bool) -> None:
    (gc.enable if was_on else gc.disable)()
    with pytest.raises(ValueError, match="enough"), without_collector():
        assert not gc.isenabled()
        raise ValueError("enough")
    assert gc.isenabled() == was_on
