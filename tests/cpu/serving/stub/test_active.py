"""What is sent when: coalescing, the ack between two responses of an ensemble, and exactly one end."""

import numpy as np

from kvforge.serving.contract.failures import CANCELLED, Failure
from kvforge.serving.contract.request import GenerationRequest
from kvforge.serving.engine.output_rows import StepOutput
from kvforge.serving.stub.active import MAX_UNHEARD_BEATS, ActiveRequest
from kvforge.serving.stub.responses import FINAL, HEARTBEAT, SEQUENCE_END, chunk_arrays, heartbeat_arrays

OUTPUTS = frozenset({"output_ids", "sequence_length", "stream_state", "output_log_probs", "cum_log_probs"})


def active(streaming: bool = True, in_ensemble: bool = False, n: int = 1, exclude: bool = True) -> ActiveRequest:
    prompt = GenerationRequest([1, 2, 3], streaming, exclude, return_log_probs=True, params={"n": n})
    return ActiveRequest(9, "id", None, [prompt], OUTPUTS, in_ensemble)


def step_output(index: int, tokens: list[int], log_probs: list[float] | None, end: bool) -> StepOutput:
    return StepOutput("9.0", index, tokens, "length" if end else None, log_probs)


def test_waiting_tokens_leave_in_one_response() -> None:
    request = active()
    for token in (4, 5, 6):
        assert request.add(step_output(0, [token], [-0.5], False))
    (chunk,), error, _ = request.take()
    assert (chunk.tokens, chunk.final, error) == ([4, 5, 6], False, None)
    arrays = chunk_arrays(request, chunk)
    assert arrays["output_ids"].tolist() == [[[4, 5, 6]]]
    assert arrays["output_log_probs"].tolist() == [[[-0.5, -0.5, -0.5]]]
    assert arrays["cum_log_probs"].tolist() == [[-1.5]]
    assert request.take() == ([], None, False)


def test_whole_answer_comes_once_with_or_without_the_prompt() -> None:
    for exclude, expected in ((True, [4, 5]), (False, [1, 2, 3, 4, 5])):
        request = active(streaming=False, exclude=exclude)
        assert not request.add(step_output(0, [4], None, False))
        assert request.take()[0] == []
        assert request.add(step_output(0, [5], None, True))
        (chunk,), _, _ = request.take()
        assert (chunk.tokens, chunk.final) == (expected, True)


def test_only_the_last_sequence_is_final() -> None:
    request = active(n=2, in_ensemble=True)
    request.add(step_output(0, [4], None, True))
    (first,), _, _ = request.take()
    request.acknowledge()
    request.add(step_output(1, [5], None, True))
    (second,), _, _ = request.take()
    assert (first.final, second.final) == (False, True)
    flags = [chunk_arrays(request, chunk)["stream_state"][0, 2] for chunk in (first, second)]
    assert flags == [SEQUENCE_END, SEQUENCE_END | FINAL]


def test_an_ensemble_gets_the_next_response_after_the_ack() -> None:
    request = active(in_ensemble=True)
    request.add(step_output(0, [4], None, False))
    (chunk,), _, _ = request.take()
    assert chunk_arrays(request, chunk)["stream_state"].tolist() == [[9, 0, 0, 1, 2, 3]]
    request.add(step_output(0, [5], None, False))
    request.add(step_output(0, [6], None, True))
    assert request.take() == ([], None, False)
    request.acknowledge()
    (chunk,), _, _ = request.take()
    assert (chunk.tokens, chunk.final, chunk.context) == ([5, 6], True, [])


def test_only_beats_without_an_ack_end_the_wait_for_it() -> None:
    """However long ago by the clock the response was sent: a machine may have stood still."""
    request = active(in_ensemble=True)
    request.add(step_output(0, [4], None, False))
    request.take()
    request.last_sent -= 1e6
    request.add(step_output(0, [5], None, False))
    for _ in range(MAX_UNHEARD_BEATS - 1):
        request.beat()
        assert request.take() == ([], None, False)
    request.beat()
    (chunk,), _, _ = request.take()
    assert (chunk.tokens, request.in_ensemble) == ([5], False)


def test_an_ack_begins_the_wait_anew() -> None:
    request = active(in_ensemble=True)
    for token in (4, 5):
        request.add(step_output(0, [token], None, False))
        assert len(request.take()[0]) == 1
        for _ in range(MAX_UNHEARD_BEATS - 1):
            request.beat()
        request.acknowledge()
    assert request.in_ensemble


def test_an_error_waits_for_the_ack_and_ends_the_request() -> None:
    request = active(in_ensemble=True)
    request.add(step_output(0, [4], None, False))
    request.take()
    request.fail(CANCELLED)
    request.fail(Failure("failed", "too late"))
    assert request.take() == ([], None, False)
    request.acknowledge()
    assert request.take() == ([], CANCELLED, False)
    request.add(step_output(0, [5], None, True))
    assert request.take() == ([], None, False)


def test_nothing_is_taken_after_an_end_that_was_sent_in_another_way() -> None:
    request = active()
    request.add(step_output(0, [4], None, False))
    request.take()
    request.finish()
    request.add(step_output(0, [5], None, True))
    request.fail(CANCELLED)
    assert request.take() == ([], None, False)


def test_heartbeat_gives_way_to_tokens() -> None:
    request = active(in_ensemble=True)
    request.beat()
    assert request.take() == ([], None, True)
    assert heartbeat_arrays(request)["stream_state"].tolist() == [[9, 0, HEARTBEAT]]
    request.acknowledge()
    request.beat()
    request.add(step_output(0, [4], None, False))
    chunks, _, heartbeat = request.take()
    assert (len(chunks), heartbeat) == (1, False)


def test_outputs_nobody_asked_for_are_left_out() -> None:
    request = active()
    request.outputs = frozenset({"output_ids"})
    request.add(step_output(0, [4], [-1.0], True))
    (chunk,), _, _ = request.take()
    assert {name: array.dtype for name, array in chunk_arrays(request, chunk).items()} == {"output_ids": np.int32}
