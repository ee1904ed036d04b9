"""What is sent when: tokens one by one or together, the end token, and exactly one end."""

import itertools

import numpy as np
import pytest

from kvforge.serving.contract.failures import CANCELLED, Failure
from kvforge.serving.contract.request import GenerationRequest
from kvforge.serving.contract.text_rows import REQUEST_END, SEQUENCE_END, RowMessage
from kvforge.serving.engine.output_rows import StepOutput
from kvforge.serving.stub.active import ActiveRequest, Chunk
from kvforge.serving.stub.responses import add_row, chunk_arrays

OUTPUTS = frozenset({"output_ids", "sequence_length", "output_log_probs", "cum_log_probs"})


def active(streaming: bool = True, n: int = 1, exclude: bool = True, interval: int = 1, keeps_end: bool = False):
    prompt = GenerationRequest([1, 2, 3], streaming, exclude, return_log_probs=True, params={"n": n})
    return ActiveRequest(9, "id", None, [prompt], OUTPUTS, stream_interval=interval, keeps_end=keeps_end)


def step_output(index: int, tokens: list[int], log_probs: list[float] | None, end: bool) -> StepOutput:
    return StepOutput("9.0", index, tokens, "length" if end else None, log_probs)


def feed(request: ActiveRequest, tokens: list[int], end: bool = False) -> bool:
    return request.add(step_output(0, tokens, [-0.5] * len(tokens), end))


def tokens_of(chunks: list[Chunk]) -> list[list[int]]:
    return [chunk.tokens for chunk in chunks]


def test_a_response_has_one_token_whatever_waits() -> None:
    request = active()
    assert feed(request, [4]) and feed(request, [5, 6])
    chunks = request.take()
    assert tokens_of(chunks) == [[4], [5], [6]]
    assert [chunk.num_output_tokens for chunk in chunks] == [1, 2, 3]
    arrays = [chunk_arrays(request, chunk) for chunk in chunks]
    assert [a["output_log_probs"].tolist() for a in arrays] == [[[[-0.5]]]] * 3
    assert [a["cum_log_probs"].item() for a in arrays] == [-0.5, -1.0, -1.5]
    assert [chunk.context for chunk in chunks] == [[1, 2, 3], [], []]
    assert request.take() == []


def test_all_that_waits_in_one_response() -> None:
    request = active(interval=0)
    for token in (4, 5, 6):
        assert feed(request, [token])
    (chunk,) = request.take()
    assert (chunk.tokens, chunk.final) == ([4, 5, 6], False)
    assert chunk_arrays(request, chunk)["output_log_probs"].tolist() == [[[-0.5, -0.5, -0.5]]]
    assert feed(request, [7])
    assert tokens_of(request.take()) == [[7]]


def test_an_interval_of_tokens_but_the_first_alone_and_the_last_however_few() -> None:
    request = active(interval=3)
    assert feed(request, [4])
    assert tokens_of(request.take()) == [[4]]
    assert not feed(request, [5]) and not feed(request, [6])
    assert request.take() == []
    assert feed(request, [7, 8])
    assert tokens_of(request.take()) == [[5, 6, 7, 8]]
    assert feed(request, [9], end=True)
    (chunk,) = request.take()
    assert (chunk.tokens, chunk.final) == ([9], True)


@pytest.mark.parametrize("reason", [None, 6])
@pytest.mark.parametrize("interval", [0, 1, 4])
@pytest.mark.parametrize("streaming", [True, False])
def test_the_token_that_ends_a_sequence_is_left_out(streaming: bool, interval: int, reason: int | None) -> None:
    request = active(streaming=streaming, interval=interval)
    for token in (4, 5):
        feed(request, [token])
    early = request.take()
    request.add(StepOutput("9.0", 0, [6], "stop", [-2.0], stop_reason=reason))
    chunks = early + request.take()
    assert [token for chunk in chunks for token in chunk.tokens] == [4, 5]
    last = chunks[-1]
    assert (last.end, last.final, last.num_output_tokens, last.cum_log_prob) == (True, True, 2, -3.0)
    assert [chunk.final for chunk in chunks[:-1]] == [False] * (len(chunks) - 1)
    assert sum(len(chunk.new.log_probs) for chunk in chunks) == 2


def test_the_end_token_comes_with_the_last_one_that_still_waits() -> None:
    request = active()
    request.add(StepOutput("9.0", 0, [4, 6], "stop", [-0.5, -2.0]))
    (chunk,) = request.take()
    assert (chunk.tokens, chunk.final, chunk.cum_log_prob) == ([4], True, -2.5)


@pytest.mark.parametrize("reason", ["text", [5, 6], (5, 6)])
def test_stop_strings_and_stop_words_stay(reason: object) -> None:
    request = active(interval=0)
    request.add(StepOutput("9.0", 0, [5, 6], "stop", [-0.5, -0.5], stop_reason=reason))
    assert tokens_of(request.take()) == [[5, 6]]


def test_the_end_token_for_who_counts_it() -> None:
    request = active(keeps_end=True)
    request.add(StepOutput("9.0", 0, [4, 6], "stop", [-0.5, -2.0]))
    assert tokens_of(request.take()) == [[4], [6]]


def test_arrays_follow_their_tokens() -> None:
    """Logits and the most probable tokens of each response are those of its tokens, wherever steps were cut."""
    outputs = frozenset({"output_ids", "generation_logits", "top_log_probs_ids", "top_log_probs"})
    prompt = GenerationRequest([1], True, True, True, return_generation_logits=True, num_top_log_probs=2)
    rng = np.random.default_rng(0)
    for _ in range(50):
        number, ends = int(rng.integers(1, 9)), bool(rng.integers(2))
        cuts = sorted({0, number, *rng.integers(0, number + 1, 2).tolist()})
        logits = rng.normal(size=(number, 4)).astype(np.float32)
        request = ActiveRequest(9, "id", None, [prompt], outputs)
        for start, end in itertools.pairwise(cuts):
            top = [([i, i + 100], [-float(i), -i - 0.5]) for i in range(start, end)]
            finished = "stop" if ends and end == number else None
            request.add(
                StepOutput(
                    "9.0",
                    0,
                    list(range(start, end)),
                    finished,
                    [-1.0] * (end - start),
                    top,
                    None,
                    None,
                    logits[start:end],
                )
            )
        chunks = request.take()
        assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [ends]
        shown = [chunk for chunk in chunks if chunk.tokens]
        assert tokens_of(shown) == [[i] for i in range(number - ends)]
        for i, chunk in enumerate(shown):
            arrays = chunk_arrays(request, chunk)
            assert np.array_equal(arrays["generation_logits"], logits[None, None, i : i + 1])
            assert arrays["top_log_probs_ids"].tolist() == [[[i, i + 100]]]
            assert arrays["top_log_probs"].tolist() == [[[-float(i), -i - 0.5]]]


def test_whole_answer_comes_once_with_or_without_the_prompt() -> None:
    for exclude, expected in ((True, [4, 5]), (False, [1, 2, 3, 4, 5])):
        request = active(streaming=False, exclude=exclude)
        assert not feed(request, [4])
        assert request.take() == []
        assert feed(request, [5], end=True)
        (chunk,) = request.take()
        assert (chunk.tokens, chunk.final) == (expected, True)


def test_only_the_last_sequence_is_final() -> None:
    request = active(n=2)
    request.add(step_output(0, [4], None, True))
    (first,) = request.take()
    request.add(step_output(1, [5], None, True))
    (second,) = request.take()
    assert (first.final, second.final) == (False, True)
    message = RowMessage()
    for chunk in (first, second):
        add_row(message, request, chunk)
    assert [row[:5] for row in message.rows] == [
        [9, 0, SEQUENCE_END, [4], [1, 2, 3]],
        [9, 1, SEQUENCE_END | REQUEST_END, [5], [1, 2, 3]],
    ]


def test_an_error_ends_the_request_once() -> None:
    request = active()
    feed(request, [4])
    request.fail(CANCELLED)
    request.fail(Failure("failed", "too late"))
    assert request.take() == []
    assert (request.take_failure(), request.take_failure()) == (CANCELLED, None)
    feed(request, [5], end=True)
    assert request.take() == []


def test_no_error_after_the_end() -> None:
    request = active()
    feed(request, [4], end=True)
    assert request.take()[-1].final
    request.fail(CANCELLED)
    assert (request.take(), request.take_failure()) == ([], None)


def test_what_could_not_be_sent_ends_in_an_error_though_all_was_taken() -> None:
    request = active()
    feed(request, [4], end=True)
    assert request.take()
    request.break_off(Failure("failed", "no room"))
    assert request.take() == []
    failure = request.take_failure()
    assert failure is not None and failure.message == "no room"


def test_a_stop_ends_with_what_there_is() -> None:
    request = active(interval=100)
    feed(request, [4])
    request.take()
    feed(request, [5])
    request.stop()
    (chunk,) = request.take()
    assert (chunk.tokens, chunk.final, chunk.sequence.finish_reason) == ([5], True, "cancelled")


def test_outputs_nobody_asked_for_are_left_out() -> None:
    request = active()
    request.outputs = frozenset({"output_ids"})
    feed(request, [4], end=True)
    (chunk,) = request.take()
    assert {name: array.dtype for name, array in chunk_arrays(request, chunk).items()} == {"output_ids": np.int32}
