"""What a step gave, through the protocol and into response tensors."""

import socket
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kvforge.runtime.requests.outputs import SequenceOutput, TokenLogprobs
from kvforge.runtime.requests.prompt_scores import PromptScores
from kvforge.runtime.requests.sequence import RequestMetrics
from kvforge.serving.contract.failures import Failure
from kvforge.serving.contract.request import GenerationRequest
from kvforge.serving.engine import process as engine_process
from kvforge.serving.engine.output_rows import StepOutput, from_row
from kvforge.serving.engine.process import EngineServer
from kvforge.serving.engine.protocol import BLOB, METERED, receive
from kvforge.serving.stub.active import ActiveRequest
from kvforge.serving.stub.responses import BUILDERS, chunk_arrays, failure_arrays

METRICS = RequestMetrics(1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 10, 4, 3)
EVERYTHING = GenerationRequest(
    [1, 2, 3], True, True, True, True, True, True, True, num_top_log_probs=2, params={"max_tokens": 5}
)


def prompt_scores() -> PromptScores:
    scores = PromptScores(3, 2)
    scores.logprobs[:], scores.ranks[:] = [-0.5, -2.5], [1, 30]
    scores.top_ids[:], scores.top[:] = [[4, 9], [5, 8]], [[-0.5, -1.5], [-0.25, -1.25]]
    scores.num_done = 2
    return scores


def outputs() -> list[SequenceOutput]:
    entry = TokenLogprobs(4, -0.5, 1, {4: -0.5, 9: -1.5})
    logits = [np.arange(6, dtype=np.float32), np.arange(6, dtype=np.float32) + 0.5]
    last = SequenceOutput("9.0", 0, [4, 5], [entry, entry], True, "stop", (7, 8), METRICS, logits, prompt_scores())
    return [SequenceOutput("8.0", 1, [6]), last]


def through_the_protocol(made: list[SequenceOutput]) -> list[list[StepOutput]]:
    """The news of each message."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = EngineServer(ours, lambda: None, lambda fields: None)
        server._send_outputs(SimpleNamespace(abort=lambda request_id: None), made)
        server._outgoing.put(None)
        server._write()
        ours.close()
        messages = list(iter(lambda: receive(theirs), None))
    return [[from_row(row, message.get(BLOB, b"")) for row in message["outputs"]] for message in messages]


def test_rows_come_back_as_they_were() -> None:
    ((plain, rich),) = through_the_protocol(outputs())
    assert plain == StepOutput("8.0", 1, [6])
    assert (rich.engine_id, rich.tokens, rich.finish_reason, rich.stop_reason) == ("9.0", [4, 5], "stop", [7, 8])
    assert rich.log_probs == [-0.5, -0.5]
    assert rich.top == [[[4, 9], [-0.5, -1.5]]] * 2
    assert rich.metrics is not None
    assert rich.metrics["num_accepted_draft_tokens"] == 3
    assert rich.logits is not None
    np.testing.assert_array_equal(rich.logits, np.stack(outputs()[1].logits or []))
    assert plain.prompt_scores is None and rich.prompt_scores is not None
    assert (len(rich.prompt_scores), rich.prompt_scores.num_done) == (2, 2)
    for got, want in zip(rich.prompt_scores.arrays, prompt_scores().arrays, strict=True):
        np.testing.assert_array_equal(got, want)


def test_metrics_come_with_every_row_where_that_was_asked_for() -> None:
    """Until the last sequence of the request has ended, or it was aborted."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = EngineServer(ours, lambda: None, lambda fields: SimpleNamespace(n=2))
        engine = SimpleNamespace(
            add_request=lambda *_: None, abort=lambda request_id: None, has_unfinished=lambda: True
        )
        for request_id in ("9.0", "9.1"):
            server._add(engine, {"op": "add", "id": request_id, "prompt": [1], "params": {}, METERED: True})
        going = SequenceOutput("9.0", 0, [4], metrics=METRICS)
        server._send_outputs(engine, [going, replace(going, request_id="8.0"), replace(going, finished=True)])
        server._send_outputs(engine, [replace(going, index=1), replace(going, index=1, finished=True)])
        guides = SimpleNamespace(abort=lambda request_id: None)
        server._commands.put({"op": "abort", "id": "9.1"})
        assert server._handle_commands(engine, guides) and not server._metered
        server._outgoing.put(None)
        server._write()
        ours.close()
        rows = [from_row(row, b"") for message in iter(lambda: receive(theirs), None) for row in message["outputs"]]
    assert [row.metrics is not None for row in rows] == [True, False, True, True, True]


def test_logits_are_split_over_messages_and_too_many_end_their_request(monkeypatch) -> None:
    monkeypatch.setattr(engine_process, "MAX_BLOB_BYTES", 120)
    messages = through_the_protocol([outputs()[1]] * 3)
    assert [len(rows) for rows in messages] == [1, 1, 1]
    monkeypatch.setattr(engine_process, "MAX_BLOB_BYTES", 90)
    ((plain, ended),) = through_the_protocol(outputs())
    assert plain.tokens == [6]
    assert (ended.finish_reason, ended.tokens) == ("error", [])
    assert "96 bytes, over 90" in ended.stop_reason


def test_every_output_has_its_shape_and_type() -> None:
    active = ActiveRequest(9, "id", None, [EVERYTHING], frozenset(BUILDERS), stream_interval=0)
    ((_, news),) = through_the_protocol(outputs())
    active.add(news)
    (chunk,) = active.take()
    arrays = chunk_arrays(active, chunk)
    assert set(arrays) == set(BUILDERS)
    expected = {
        "output_ids": [[[4, 5]]], "sequence_length": [[2]], "batch_index": [[0]], "cum_log_probs": [[-1.0]],
        "output_log_probs": [[[-0.5, -0.5]]], "num_input_tokens": [[3]], "num_output_tokens": [[2]],
        "finish_reason": [[b"stop"]], "stop_reason": [[b"[7, 8]"]], "top_log_probs_ids": [[[4, 9], [4, 9]]],
        "top_log_probs": [[[-0.5, -1.5], [-0.5, -1.5]]], "kv_cache_reused_blocks": [[9]],
        "kv_cache_alloc_total_blocks": [[12]], "kv_cache_alloc_new_blocks": [[10]], "acceptance_rate": [[0.75]],
        "total_draft_tokens": [[4]], "total_accepted_draft_tokens": [[3]], "arrival_time_ns": [[1]],
        "first_scheduled_time_ns": [[3]], "first_token_time_ns": [[5]], "last_token_time_ns": [[7]],
        "prompt_log_probs": [[-0.5, -2.5]], "prompt_log_probs_ranks": [[1, 30]],
        "prompt_top_log_probs_ids": [[[4, 9], [5, 8]]], "prompt_top_log_probs": [[[-0.5, -1.5], [-0.25, -1.25]]],
    }  # fmt: skip
    assert {name: arrays[name].tolist() for name in expected} == expected
    assert arrays["generation_logits"].shape == (1, 1, 2, 6)
    assert arrays["arrival_time_ns"].dtype == np.int64


def test_prompts_come_with_the_first_response_alone() -> None:
    active = ActiveRequest(9, "id", None, [EVERYTHING], frozenset({"output_ids", "prompt_log_probs"}))
    active.add(StepOutput("9.0", 0, [4, 5], prompt_scores=prompt_scores()))
    active.add(StepOutput("9.0", 0, [6], "length"))
    found = [sorted(chunk_arrays(active, chunk)) for chunk in active.take()]
    assert found == [["output_ids", "prompt_log_probs"], ["output_ids"], ["output_ids"]]


@pytest.mark.parametrize("vocab_size", [2, 1])
def test_a_vocabulary_smaller_than_the_number_of_top_log_probs(vocab_size: int) -> None:
    active = ActiveRequest(
        9, "id", None, [EVERYTHING], frozenset({"top_log_probs", "top_log_probs_ids"}), stream_interval=0
    )
    top = [(list(range(vocab_size)), [-0.5] * vocab_size)] * 3
    active.add(StepOutput("9.0", 0, [0, 0, 0], "length", [-0.5] * 3, top))
    (chunk,) = active.take()
    assert {array.shape for array in chunk_arrays(active, chunk).values()} == {(1, 3, vocab_size)}


def test_waiting_log_probs_take_no_object_per_number() -> None:
    """Giving back millions of objects at once held up all threads of the stub for 0.8 s."""
    request = replace(EVERYTHING, streaming=False, num_top_log_probs=20)
    active = ActiveRequest(9, "id", None, [request], frozenset(BUILDERS))
    num_tokens = 500
    tracemalloc.start()
    try:
        for step in range(num_tokens):
            top = (list(range(1000, 1020)), [-float(step * 20 + i) for i in range(20)])
            active.add(StepOutput("9.0", 0, [4], None, [-0.5], [top]))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < num_tokens * 41 * 8  # 4 bytes a number, with what arrays keep for growing


def test_a_failure_as_tensors() -> None:
    active = ActiveRequest(9, "id", None, [EVERYTHING], frozenset(BUILDERS), stream_interval=0)
    arrays = failure_arrays(active.outputs, Failure("cancelled", "gone"))
    assert arrays["finish_reason"].item() == b"error"
    assert b'"CANCELLED"' in arrays["stop_reason"].item()
    assert arrays["output_ids"].shape == (1, 1, 0)
