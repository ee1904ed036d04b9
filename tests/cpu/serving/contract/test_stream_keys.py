"""Keys that the models of one server recognise and nobody else can make."""

import random
import stat
from pathlib import Path

import numpy as np

from kvforge.serving.contract.stream_keys import SECRET_FILE, StreamKeys
from tests.support.serving.refusals import refused


def test_makers_of_one_folder_share_a_secret_and_never_a_key(tmp_path: Path) -> None:
    first, second = StreamKeys(tmp_path), StreamKeys(tmp_path, lane=1)
    keys = [maker.make() for maker in (first, second) for _ in range(500)]
    assert len(set(keys)) == len(keys)
    assert all(first.is_valid(key) and second.is_valid(key) for key in keys)
    assert max(keys) < 2**62
    assert stat.S_IMODE((tmp_path / SECRET_FILE).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [SECRET_FILE]


def test_keys_of_another_server_and_guesses_are_not_valid(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    mine, other = StreamKeys(tmp_path), StreamKeys(tmp_path / "other")
    rng = random.Random(5)
    guesses = [rng.randrange(-(2**63), 2**63) for _ in range(1000)] + [0, 1, 2**62, 2**63 - 1, -1]
    assert not any(mine.is_valid(key) for key in [*guesses, *(other.make() for _ in range(100))])


def test_a_tensor_of_one_valid_key_is_read(tmp_path: Path) -> None:
    keys = StreamKeys(tmp_path)
    key, next_key = keys.make(), keys.make()
    assert keys.read(None) is None
    assert keys.read(np.array([[key], [key]])) == key
    for tensor in ([[key], [next_key]], [[key + 1]], [[]]):
        with refused("leave it out"):
            keys.read(np.array(tensor, dtype=np.int64))
