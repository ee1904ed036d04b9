"""vLLM's engine behind the interface of ours, over a vLLM that counts: ``[..., a]`` is followed by ``a + 1``."""

import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvforge.common.errors import EngineError, RequestError
from kvforge.compiler import BuildOptions, build_engine
from kvforge.runtime import SamplingParams
from kvforge.runtime.requests.outputs import SequenceOutput
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.step.work import Work
from kvforge.vllm_engine.engine import VllmEngine, load_engine
from tests.support.vllm.interpreters import FAKE, telling_interpreter

SWIFTKV = Path(__file__).resolve().parents[3] / "model_defs" / "assets" / "tiny-swiftkv"


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    options = BuildOptions(
        target="vllm",
        engine_python=telling_interpreter(folder),
        tensor_parallel_size=2,
        max_seq_len=256,
        max_num_tokens=32,
        engine_args='{"enforce_eager": true}',
    )
    build_engine(SWIFTKV, folder / "engine", options)
    return folder / "engine"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has the vLLM that counts."""
    monkeypatch.syspath_prepend(str(FAKE))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture
def engine(engine_dir: Path, fake: None) -> VllmEngine:
    return load_engine(engine_dir, max_seq_len=128)


def run(engine: VllmEngine) -> dict[tuple[str, int], list[SequenceOutput]]:
    """All outputs of all sequences until nothing is open."""
    outputs: dict[tuple[str, int], list[SequenceOutput]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs.setdefault((output.request_id, output.index), []).append(output)
    return outputs


def tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def end(engine: VllmEngine, prompt: list[int], **params: Any) -> tuple[list[int], Any, Any]:
    """The tokens of a request of one sequence, why it ended, and by what."""
    engine.add_request("a", prompt, SamplingParams(**params))
    (outputs,) = run(engine).values()
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return tokens(outputs), outputs[-1].finish_reason, outputs[-1].stop_reason


def test_arguments_of_vllm(engine: VllmEngine, engine_dir: Path) -> None:
    arguments = engine._core._engine.arguments
    assert arguments["model"] == str(SWIFTKV) and arguments["kv_sharing_fast_prefill"]
    assert arguments["compilation_config"] == {"custom_ops": ["all"]}
    sizes = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size", "tensor_parallel_size")
    assert [arguments[name] for name in sizes] == [128, 32, 32, 32, 2]
    assert arguments["dtype"] == "bfloat16" and arguments["enforce_eager"] and arguments["enable_prefix_caching"]
    assert arguments["worker_cls"] == "kvforge.vllm_models.cpu_worker.KvforgeCpuWorker"  # the platform is a CPU
    more = load_engine(engine_dir, kv_cache_gib=0.5, enable_prefix_cache=False)._core._engine.arguments
    assert more["kv_cache_memory_bytes"] == 2**29 and not more["enable_prefix_caching"]


def test_what_ends_a_sequence(engine: VllmEngine) -> None:
    assert end(engine, [10], max_tokens=3) == ([11, 12, 13], "length", None)
    assert end(engine, [98], max_tokens=9) == ([99, 0, 1], "stop", None)  # 1 is the end of text
    assert end(engine, [98], max_tokens=4, ignore_eos=True) == ([99, 0, 1, 2], "length", None)
    assert end(engine, [10], max_tokens=9, stop_token_ids=[13]) == ([11, 12, 13], "stop", 13)
    assert end(engine, [10], max_tokens=9, stop_words_ids=[[12, 13]]) == ([11, 12, 13], "stop", (12, 13))
    after = {"stop_words_ids": [[12, 13], [15, 16]], "min_tokens": 4}
    assert end(engine, [10], max_tokens=9, **after)[0] == [11, 12, 13, 14, 15, 16]


def test_a_stop_string_ends_a_sequence_and_frees_its_pages(engine: VllmEngine) -> None:
    assert engine.tokenizer is not None
    text = engine.tokenizer.decode([70, 71, 72, 73])
    stop = engine.tokenizer.decode([72])
    assert stop and stop in text
    found, reason, detail = end(engine, [69], max_tokens=9, stop=[stop])
    assert (reason, detail) == ("stop", stop) and found[-1] <= 72
    assert engine.stats()["num_used_pages"] == 0 and not engine._sequences


def test_a_sequence_ends_at_the_engine_s_length(engine: VllmEngine) -> None:
    prompt = [(i % 90) + 5 for i in range(120)]
    found, reason, _ = end(engine, prompt, max_tokens=99, ignore_eos=True)
    assert len(found) == 8 and reason == "length"


def test_several_sequences_of_a_request_and_their_logprobs(engine: VllmEngine) -> None:
    engine.add_request("a", [10], SamplingParams(n=3, max_tokens=2, logprobs=2, seed=5))
    fields = [request.fields for request in engine._core._engine.running]
    assert [each["seed"] for each in fields] == [5, 6, 7]
    outputs = run(engine)
    assert {key: tokens(found) for key, found in outputs.items()} == {("a", i): [11, 12] for i in range(3)}
    (entry,) = outputs["a", 1][0].logprobs or ()
    assert (entry.token_id, entry.rank, list(entry.top)) == (11, 1, [11, 13])
    assert entry.logprob == entry.top[11] == math.log(0.5)


def test_logprobs_of_the_chosen_token_alone(engine: VllmEngine) -> None:
    engine.add_request("a", [10], SamplingParams(max_tokens=1, logprobs=0))
    (output,) = run(engine)["a", 0]
    assert output.logprobs is not None and output.logprobs[0].top == {}


def test_abort_gives_a_request_up(engine: VllmEngine) -> None:
    engine.add_request("a", [10], SamplingParams(n=2, max_tokens=50))
    engine.add_request("b", [20], SamplingParams(max_tokens=2))
    engine.step()
    assert engine.abort("a") and not engine.abort("a")
    assert {key for key, _ in run(engine)} == {"b"}
    stats = engine.stats()
    assert (stats["num_running"], stats["num_used_pages"]) == (0, 0)
    assert stats["num_finished"] == {"stop": 0, "length": 1, "abort": 2, "error": 0}


def test_a_deadline_ends_a_request(engine: VllmEngine) -> None:
    engine.add_request("a", [10], SamplingParams(max_tokens=50, deadline_s=1e-9))
    (outputs,) = run(engine).values()
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("abort", "deadline")
    assert not engine._core._engine.running


def test_refusals_keep_nothing(engine: VllmEngine) -> None:
    for prompt, params, words in (
        ([10], {"draft_token_ids": [3]}, "draft_token_ids is not offered"),
        ([], {}, "the prompt is empty"),
        ([5000], {}, "token id 5000"),
        ([10], {"logit_bias": {5000: 1.0}}, "logit_bias holds token id 5000"),
    ):
        with pytest.raises(RequestError, match=words):
            engine.add_request("a", prompt, SamplingParams(**params))
    engine.add_request("a", [10], SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="is in use"):
        engine.add_request("a", [10], SamplingParams())
    assert len(run(engine)) == 1 and not engine.requests


def test_what_vllm_refuses_is_refused_whole(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    adds = iter([True, False])
    own = engine._core.add

    def add(*args: Any) -> None:
        if not next(adds):
            raise ValueError("no such thing.")
        own(*args)

    monkeypatch.setattr(engine._core, "add", add)
    with pytest.raises(RequestError, match="vLLM refuses the request: no such thing"):
        engine.add_request("a", [10], SamplingParams(n=2))
    assert not engine.has_unfinished() and not engine._core._engine.running


def test_bias_and_priority_arrive(engine: VllmEngine) -> None:
    engine.add_request("a", [10], SamplingParams(max_tokens=1, logit_bias={77: 5000.0}, priority=-3))
    (request,) = engine._core._engine.running
    assert request.priority == -3
    assert tokens(run(engine)["a", 0]) == [77]


def test_statistics_and_metrics(engine: VllmEngine) -> None:
    works: list[Work] = []
    engine.watch(works.append)
    engine.add_request("a", list(range(10, 60)), SamplingParams(max_tokens=3))
    engine.step()
    stats = engine.stats()
    assert (stats["num_running"], stats["num_prefilling"], stats["num_context_tokens"]) == (1, 1, 32)
    assert (stats["num_pages"], stats["num_used_pages"], stats["page_size"]) == (64, 1, 32)
    (outputs,) = run(engine).values()
    stats = engine.stats()
    assert [work.kind for work in works] == ["prefill", "prefill", "decode", "decode"]
    assert (stats["num_iterations"], stats["num_generated_tokens"], stats["num_running"]) == (4, 3, 0)
    assert stats["histograms"]["ttft_s"]["count"] == stats["histograms"]["e2e_s"]["count"] == 1
    assert stats["histograms"]["queue_s"]["sum"] == 0.25
    assert stats["histograms"]["prompt_tokens"]["sum"] == 50
    metrics = outputs[-1].metrics
    assert metrics is not None and metrics.num_allocated_pages == metrics.num_new_pages == 2
    assert metrics.first_scheduled_time_ns - metrics.arrival_time_ns == 250_000_000
    assert metrics.first_token_time_ns and metrics.last_token_time_ns >= metrics.first_token_time_ns


def test_a_statistic_of_ours_is_one_of_its(engine: VllmEngine) -> None:
    """Metrics read these from any engine."""
    from kvforge.serving.stub.metric_tables import COUNTERS, FAMILIES, GAUGES, HISTOGRAMS

    stats = {**engine.stats(), "timestamp_us": 0}
    for _, readers in FAMILIES.values():
        assert all(read(stats) >= 0 for read in readers.values())
    assert all(read(stats) >= 0 for read, _ in (*GAUGES.values(), *COUNTERS.values()))
    assert HISTOGRAMS.keys() <= stats["histograms"].keys()


def test_a_rank_that_ended_ends_the_engine_also_where_it_is_idle(engine: VllmEngine) -> None:
    core: Any = engine._core
    core._engine.executor.is_failed = True
    with pytest.raises(EngineError, match="a process of vLLM's ranks ended unexpectedly"):
        engine.stats()


def test_what_a_step_raises_when_a_rank_has_ended_is_said_in_our_words(engine: VllmEngine) -> None:
    """vLLM may notice after the other ranks' connections have broken."""
    core: Any = engine._core
    executor = core._engine.executor
    executor.workers = []

    def broken() -> None:
        threading.Timer(0.2, lambda: setattr(executor, "is_failed", True)).start()
        raise RuntimeError("Connection reset by peer")

    core._engine.step = broken
    engine.add_request("a", [1], SamplingParams(max_tokens=2))
    with pytest.raises(EngineError, match="a process of vLLM's ranks ended unexpectedly"):
        engine.step()


def test_loading_says_what_is_wrong(engine_dir: Path, fake: None, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="max_seq_len is 512, but the engine was built for 1 to 256"):
        load_engine(engine_dir, max_seq_len=512)
    with pytest.raises(EngineError, match="drafts and early exits"):
        load_engine(engine_dir, speculative=SpeculativeConfig("ngram"))
    with pytest.raises(EngineError, match="drafts and early exits"):
        load_engine(engine_dir, early_exit_prompts=True)
    options = BuildOptions(
        target="vllm", engine_python=telling_interpreter(tmp_path), engine_args='{"no_such_argument": 1}'
    )
    build_engine(SWIFTKV, tmp_path / "engine", options)
    with pytest.raises(EngineError, match="unexpected keyword argument 'no_such_argument'"):
        load_engine(tmp_path / "engine")


def test_without_vllm_loading_says_so(engine_dir: Path) -> None:
    with pytest.raises(EngineError, match="vLLM cannot be imported"):
        load_engine(engine_dir)
