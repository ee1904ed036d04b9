"""Workloads: reading them, and timing an engine on one."""

import json
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from kvforge.common.errors import KvforgeError
from kvforge.runtime import SamplingParams
from kvforge.runtime.interface import Engine
from kvforge.runtime.requests.checks import longer_sequences

FIRST_TOKEN_ID = 3
"""Random prompts avoid the lowest ids, which are usually special tokens."""


@dataclass(frozen=True)
class Workload:
    """``requests`` prompts of ``input_tokens`` random tokens, ``output_tokens`` generated for each."""

    name: str
    requests: int
    input_tokens: int
    output_tokens: int


def load_workloads(path: Path, only: list[str] | None = None) -> list[Workload]:
    """Read ``{name: {requests, input_tokens, output_tokens}}``, of which ``only`` keeps the named ones.

    Raises:
        KvforgeError: the file cannot be read or is not of this form, or a name in ``only`` is not in it.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise KvforgeError(f"{path} cannot be read as workloads ({error}); give a JSON file.") from None
    names = [field.name for field in fields(Workload)][1:]
    if not isinstance(data, dict) or not data:
        raise KvforgeError(f"{path} holds no workloads; give a JSON object of name: {{{', '.join(names)}}}.")
    for name, entry in data.items():
        if (
            not isinstance(entry, dict)
            or set(entry) != set(names)
            or any(type(value) is not int or value < 1 for value in entry.values())
        ):
            raise KvforgeError(
                f"workload {name!r} in {path} is wrong; give {', '.join(names)} as whole numbers of at least 1."
            )
    for name in only or []:
        if name not in data:
            raise KvforgeError(f"{path} has no workload {name!r}; it has {', '.join(data)}.")
    return [Workload(name, **entry) for name, entry in data.items() if not only or name in only]


def check_fits(workload: Workload, engine: Engine) -> None:
    """Raise KvforgeError unless the engine can serve the workload's sequences."""
    length, config = workload.input_tokens + workload.output_tokens, engine.config
    if length > config.max_seq_len:
        raise KvforgeError(
            f"workload {workload.name!r} needs sequences of {length} tokens, but the engine "
            f"takes {config.max_seq_len}; give shorter ones, or {longer_sequences(config.max_seq_len)}."
        )
    if length - 1 > config.num_pages * config.page_size:
        raise KvforgeError(
            f"workload {workload.name!r} needs sequences of {length} tokens, but the KV cache "
            f"holds {config.num_pages * config.page_size}; raise --kv-cache-gib."
        )
    if config.vocab_size <= FIRST_TOKEN_ID:
        raise KvforgeError(
            f"the model's {config.vocab_size} tokens are too few for random prompts; bench another engine."
        )


def warm_up(engine: Engine, workloads: list[Workload], seed: int) -> None:
    """Run one short request, so that one-time costs are not measured."""
    longest = min(min(workload.input_tokens for workload in workloads), engine.config.max_num_tokens)
    run_once(engine, Workload("warm-up", 1, longest, 2), np.random.default_rng(seed))


@dataclass(frozen=True)
class RunTimes:
    """Seconds of one run: ``ttft`` to the first token of the first request, ``prompted`` to that of the last one,
    ``total`` to the end; ``later`` tokens came after ``prompted``. ``token`` is the median of what requests took for
    each token after their first, None where they have one."""

    ttft: float
    prompted: float
    total: float
    later: int
    token: float | None


def run_once(engine: Engine, workload: Workload, rng: np.random.Generator) -> RunTimes:
    """Run all requests of a workload at once. Raises KvforgeError where one fails."""
    shape = (workload.requests, workload.input_tokens)
    prompts = rng.integers(FIRST_TOKEN_ID, engine.config.vocab_size, shape).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=workload.output_tokens, ignore_eos=True)
    traces: dict[str, list[tuple[float, int]]] = {f"{workload.name}-{i}": [] for i in range(len(prompts))}
    start = time.perf_counter()
    for name, prompt in zip(traces, prompts, strict=True):
        engine.add_request(name, prompt, params)
    while engine.has_unfinished():
        for output in engine.step():
            if output.finish_reason == "error":
                raise KvforgeError(f"workload {workload.name!r} failed: {output.stop_reason}.")
            if output.new_token_ids:
                traces[output.request_id].append((time.perf_counter() - start, len(output.new_token_ids)))
    total = time.perf_counter() - start
    firsts = [trace[0][0] for trace in traces.values()]
    later = sum(count for trace in traces.values() for at, count in trace if at > max(firsts))
    paces = [(trace[-1][0] - trace[0][0]) / sum(count for _, count in trace[1:])
             for trace in traces.values() if len(trace) > 1]  # fmt: skip
    return RunTimes(firsts[0], max(firsts), total, later, float(np.median(paces)) if paces else None)


def measure(workload: Workload, engine: Engine, seed: int, num_runs: int = 1, drafts: bool = False) -> dict[str, Any]:
    """Return the line to print; of several runs that of median total time (the lower of two middle ones). ``drafts``:
    the engine drafts, and the line says how well."""
    rng, before = np.random.default_rng(seed), engine.stats()
    runs = sorted((run_once(engine, workload, rng) for _ in range(num_runs)), key=lambda run: run.total)
    run = runs[(len(runs) - 1) // 2]
    tokens = workload.requests * (workload.input_tokens + workload.output_tokens)
    result: dict[str, Any] = {
        "peer": "kvforge",
        "workload": workload.name,
        "ttft_s": run.ttft,
        "total_s": run.total,
        "prompt_tok_s": workload.requests * workload.input_tokens / run.prompted,
        "combined_tok_s": tokens / run.total,
    }
    if run.token is not None:
        result |= {"decode_tok_s": run.later / (run.total - run.prompted), "token_ms": 1e3 * run.token}
    policy, after = engine.config.kv_policy, engine.stats()
    if drafts:
        result |= _drafts(before, after)
    else:
        exits = {name: f"num_{name}" for name in ("early_exits", "prompt_early_exits")}
        result |= {name: after[key] - before[key] for name, key in exits.items() if after[key]}
    result |= policy.keeping.report(
        {name: after[f"num_{name}"] - before[f"num_{name}"] for name in policy.keeping.counters}
    )
    if num_runs > 1:
        result["runs_total_s"] = [run.total for run in runs]
    return result


def _drafts(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Drafts of all runs: their number, their tokens, the share of those that became text and how many a draft."""
    drafts, tokens, accepted = (
        after[name] - before[name] for name in ("num_drafts", "num_draft_tokens", "num_accepted_draft_tokens")
    )
    return {
        "drafts": drafts,
        "draft_tokens": tokens,
        "acceptance": accepted / max(tokens, 1),
        "mean_accepted_length": accepted / max(drafts, 1),
    }
