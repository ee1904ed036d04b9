"""What sequences with a common beginning share, by hand."""

import numpy as np
import pytest

from perf.gallery.requests import Lengths, make_sequence
from perf.gallery.sharing import behind, samples, share


def test_two_samples_by_hand() -> None:
    """A prompt of 9 tokens has two whole pages of 4. The first sample computes them alone in step 1 (3 pages). In step
    2 it has token 10 and the second sample the rest of the prompt: 2 shared pages and 2 of their own; so in step 3,
    where the second sample is alone with its 3."""
    prompt = np.arange(9, dtype=np.int32)
    pair = [make_sequence(index, prompt, 2) for index in range(2)]
    for sequence in pair:
        sequence.siblings = pair
    found = share(pair, 4)
    assert found.saved == 1 - (3 + 4 + 3) / (3 + 6 + 3)
    assert found.reused == 8 / 18


def test_nothing_in_common_is_nothing_saved() -> None:
    found = share(behind(0), 16)
    assert found.saved == 0 and found.reused == 0


def test_more_samples_and_longer_beginnings_save_more() -> None:
    short = Lengths("short", 60, 20)
    saved = [share(samples(short, number), 16).saved for number in (1, 2, 4)]
    assert saved[0] == 0 and saved[0] < saved[1] < saved[2] < 3 / 4
    assert share(behind(128), 16).saved < share(behind(512), 16).saved
    assert share(behind(512), 16).reused == pytest.approx(31 * 512 / (32 * 612))
