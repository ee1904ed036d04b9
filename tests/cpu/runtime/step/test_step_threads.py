"""Small steps run on one thread, large ones on torch's; the caller's setting stays."""

import pytest
import torch

from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.step.threads import SMALL_STEP
from tests.support.sessions.fake import FakeSession


@pytest.fixture
def three_threads():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize(
    "num_parameters, expected", [(100, [1, 1, 1]), (SMALL_STEP // 4, [3, 1, 1]), (SMALL_STEP, [3, 3, 3])]
)
def test_threads_follow_weights_times_tokens(three_threads, num_parameters, expected) -> None:
    session = FakeSession(num_parameters=num_parameters)
    seen = []
    session.fail_on = lambda s: seen.append(torch.get_num_threads())
    engine = LLMEngine(session=session, num_pages=20)
    engine.add_request("a", [5] * 9, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    while engine.has_unfinished():
        engine.step()
        assert torch.get_num_threads() == 3
    assert seen == expected


def test_the_setting_stays_after_an_error(three_threads, caplog) -> None:
    session = FakeSession()
    session.fail_on = lambda s: True
    engine = LLMEngine(session=session, num_pages=20)
    engine.add_request("a", [5], SamplingParams())
    assert engine.step()[0].finish_reason == "error" and torch.get_num_threads() == 3
