"""The demo: build, serve, ask, check and compare the teacher and its SwiftKV student."""

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvforge.common.errors import KvforgeError
from kvforge.compiler import BuildOptions, build_engine
from kvforge.demo.needles import MAX_ANSWER_TOKENS, make_questions
from kvforge.demo.report import ModelReport, comparison_table, make_report, note_of_load, note_of_pairs
from kvforge.demo.streamed import StreamedAnswer, StreamedRun, ask_all, ask_in_turns
from kvforge.evaluation.score import answer_of, is_correct
from kvforge.manifest import TOKENIZER_DIR, load_manifest
from kvforge.runtime import LLM, SamplingParams
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from kvforge.tasks.prompt import Example

ENGINE_OPTIONS = BuildOptions(dtype="float32", kv_dtype="float32", max_num_seqs=8, max_num_tokens=512)
"""float32, so that the streamed answers must equal the offline ones whatever the batches were."""

KV_CACHE_GIB = 0.25
NUM_PAIRS = 15
"""Questions that both models are asked by turns: three of each length."""


@dataclass(frozen=True)
class DemoModel:
    """A checkpoint of the demo and the accuracy it must reach."""

    name: str
    folder: str
    min_accuracy: float


TEACHER = DemoModel("teacher", "tiny-teacher", 0.9)
STUDENT = DemoModel("SwiftKV", "tiny-swiftkv", 0.8)


def run_demo(models_dir: Path, work_dir: Path, num_questions: int, concurrency: int, seed: int) -> bool:
    """Print what happens and the table; True when both models answered well and as they do offline.

    Raises KvforgeError when a step fails.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch").setLevel(logging.ERROR)
    started, load = time.monotonic(), os.getloadavg()[0]
    engines = [_build(model, models_dir / model.folder, work_dir) for model in (TEACHER, STUDENT)]
    questions, others = _questions(engines[0], num_questions, seed), _questions(engines[0], NUM_PAIRS, seed + 1)
    with ExitStack() as servers:
        served = [_serve(engine, servers) for engine in engines]
        runs = [_ask(engine, server, questions, concurrency) for engine, server in zip(engines, served, strict=True)]
        print(f"{len(others)} questions to each by turns, for the time to the first token ...", flush=True)
        pairs = ask_in_turns((served[0].grpc_url, served[1].grpc_url), [question.prompt for question in others])
    reports = [_report(engine, questions, run) for engine, run in zip(engines, runs, strict=True)]
    print(f"\n{comparison_table(reports[0], reports[1], pairs)}\n")
    for note in (note_of_load(load, len(os.sched_getaffinity(0))), note_of_pairs(pairs)):
        if note:
            print(f"{note}\n")
    problems = [problem for model, report in zip((TEACHER, STUDENT), reports, strict=True)
                for problem in find_problems(model, report)]  # fmt: skip
    for problem in problems:
        print(f"FAILED: {problem}")
    if not problems:
        print(f"All streamed answers equal the offline ones. Done in {time.monotonic() - started:.0f} s.")
    return not problems


@dataclass(frozen=True)
class DemoEngine:
    """A model of the demo, built."""

    model: DemoModel
    path: Path


def _build(model: DemoModel, checkpoint: Path, work_dir: Path) -> DemoEngine:
    if not (checkpoint / "config.json").is_file():
        raise KvforgeError(f"{checkpoint} is no checkpoint: run the demo from a source tree or give --models")
    path = work_dir / model.folder
    print(f"{model.name}: building {path} from {checkpoint} ...", flush=True)
    began = time.monotonic()
    build_engine(checkpoint, path, ENGINE_OPTIONS, overwrite=True)
    print(f"{model.name}: built in {time.monotonic() - began:.0f} s", flush=True)
    return DemoEngine(model, path)


def _questions(engine: DemoEngine, num: int, seed: int) -> list[Example]:
    tokenizer = Tokenizer.from_dir(engine.path / TOKENIZER_DIR)
    if tokenizer is None:
        raise KvforgeError(f"{engine.path} has no tokenizer.json, which the demo's questions need")
    return make_questions(lambda text: len(tokenizer.encode(text, False)), num, seed)


def _serve(engine: DemoEngine, servers: ExitStack) -> TritonServer:
    server = servers.enter_context(TritonServer(engine.path, ServerOptions(kv_cache_gib=KV_CACHE_GIB)))
    print(f"{engine.model.name}: {server.grpc_url} is up", flush=True)
    return server


def _ask(engine: DemoEngine, server: TritonServer, questions: Sequence[Example], concurrency: int) -> StreamedRun:
    print(f"{engine.model.name}: streaming {len(questions)} answers ...", flush=True)
    prompts = [question.prompt for question in questions]
    return ask_all(server.grpc_url, prompts, concurrency, _printer(engine.model.name, questions))


def _report(engine: DemoEngine, questions: Sequence[Example], run: StreamedRun) -> ModelReport:
    """Compare what was streamed with what the engine answers without a server."""
    print(f"{engine.model.name}: answering them again without a server ...", flush=True)
    prompts = [question.prompt for question in questions]
    llm = LLM(engine.path, kv_cache_gib=KV_CACHE_GIB)
    offline = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS), use_tqdm=False)
    texts = [output.outputs[0].text for output in offline]
    manifest = load_manifest(engine.path)
    return make_report(engine.model.name, manifest, _allocated_bytes_per_token(llm), questions, run, texts)


def _printer(name: str, questions: Sequence[Example]) -> Callable[[int, StreamedAnswer], None]:
    lock = threading.Lock()

    def show(index: int, answer: StreamedAnswer) -> None:
        question = questions[index].prompt.rsplit("Question: ", 1)[1].split("\n", 1)[0]
        verdict = "ok" if is_correct(questions[index], answer.text) else f"wrong, it is {questions[index].answer}"
        line = f"  {name} {index + 1:3d}  {answer.num_prompt_tokens:4d} tokens  {question}"
        with lock:
            print(f"{line} {answer_of(answer.text)} ({verdict})", flush=True)

    return show


def _allocated_bytes_per_token(llm: LLM) -> float:
    """Bytes of the engine's K,V pools as they lie in memory, per token that fits in."""
    assert isinstance(llm.engine, LLMEngine)
    pools = llm.engine.runner.pools
    num_bytes = sum(tensor.numel() * tensor.element_size() for pool in pools for tensor in pool)
    return num_bytes / (llm.engine.config.num_pages * llm.engine.config.page_size)


def find_problems(model: DemoModel, report: ModelReport) -> list[str]:
    """Sentences for what the model did not reach; none when all is well."""
    problems = []
    if report.accuracy < model.min_accuracy:
        problems.append(f"{model.name} answered {report.accuracy:.0%} right, at least {model.min_accuracy:.0%} is due")
    if report.num_different_offline:
        problems.append(f"{report.num_different_offline} streamed answers of {model.name} differ from the offline ones")
    return problems
