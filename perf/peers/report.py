"""What the runs say: medians, ratios of paired runs, shares of the floor, and targets."""

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

from perf.engine.floors import Rates, Work, best_rates
from perf.peers.systems import (
    CUT_4WAY,
    CUT_4WAY_INT4_KV,
    CUT_4WAY_INT8,
    LLAMA_CPP,
    LLAMA_CPP_FILE,
    NO_CUT,
    NO_CUT_INT4,
    NO_CUT_INT4_KV,
    NO_CUT_INT8,
    OPENVINO,
    OPENVINO_INT4,
    OPENVINO_INT8,
    PACE,
    TRANSFORMERS,
    VLLM,
)  # fmt: skip

Line = dict[str, Any]
"""A run: round, workload, system, combined_tok_s, the fields of ``PhaseTimes``, and where the system's work is known
``prefill_work`` and ``decode_work``; or ``rates``, measured between the runs."""

EVERYWHERE = ("prompt_heavy", "long_prompt", "chat", "single")
LONG = ("prompt_heavy", "long_prompt")
BATCHES = ("prompt_heavy", "chat")
SHORT = ("chat", "single")
PLAIN = (
    NO_CUT, NO_CUT_INT8, NO_CUT_INT4, OPENVINO, OPENVINO_INT8, OPENVINO_INT4, LLAMA_CPP, LLAMA_CPP_FILE, VLLM, PACE,
)  # fmt: skip
"""The systems that compute what transformers computes, with weights as they are or rounded."""


@dataclass(frozen=True)
class Check:
    """The ratio of ``metric`` between two systems, or without ``other`` the metric itself, is at least (at most, where
    ``at_most``) ``limit`` on each of ``workloads``."""

    what: str
    metric: str
    system: str
    other: str | None
    limit: float
    workloads: tuple[str, ...]
    at_most: bool = False


CHECKS = (
    Check("bf16 without a cut against OpenVINO: combined tok/s", "combined_tok_s", NO_CUT, OPENVINO, 0.9, EVERYWHERE),
    Check("bf16 with cut and 4-way against OpenVINO: combined tok/s", "combined_tok_s", CUT_4WAY, OPENVINO, 1.4, LONG),
    Check("bf16 with cut and 4-way against our own without: TTFT", "ttft_s", CUT_4WAY, NO_CUT, 0.6, EVERYWHERE, True),
    Check("bf16 with cut and 4-way against transformers: tok/s", "combined_tok_s", CUT_4WAY, TRANSFORMERS, 4.0, LONG),
    Check("int8 against bf16 weights, no cut: prefill", "prefill_rate", NO_CUT_INT8, NO_CUT, 1.3, ("prompt_heavy",)),
    Check("int8 against bf16 weights, cut: prefill", "prefill_rate", CUT_4WAY_INT8, CUT_4WAY, 1.3, ("prompt_heavy",)),
    Check("int8 against bf16 weights, no cut: decode", "decode_rate", NO_CUT_INT8, NO_CUT, 1.6, ("single",)),
    Check("int8 against bf16 weights, cut: decode", "decode_rate", CUT_4WAY_INT8, CUT_4WAY, 1.6, ("single",)),
    Check("int4 against int8 weights, no cut: decode", "decode_rate", NO_CUT_INT4, NO_CUT_INT8, 1.6, ("single",)),
    Check("int4 against bf16 cache, no cut: tok/s", "combined_tok_s", NO_CUT_INT4_KV, NO_CUT, 1.0, ("prompt_heavy",)),
    Check("int4 against bf16 cache, cut: tok/s", "combined_tok_s", CUT_4WAY_INT4_KV, CUT_4WAY, 1.0, ("prompt_heavy",)),
    Check("int8 with cut against OpenVINO int8: tok/s", "combined_tok_s", CUT_4WAY_INT8, OPENVINO_INT8, 1.4, LONG),
    Check("bf16 without a cut against vLLM: combined tok/s", "combined_tok_s", NO_CUT, VLLM, 1.6, LONG),
    Check("bf16 without a cut against vLLM: combined tok/s", "combined_tok_s", NO_CUT, VLLM, 1.2, SHORT),
    Check("bf16 without a cut against PACE: combined tok/s", "combined_tok_s", NO_CUT, PACE, 1.0, EVERYWHERE),
    Check("bf16 with cut and 4-way against vLLM: combined tok/s", "combined_tok_s", CUT_4WAY, VLLM, 2.5, LONG),
    *(
        Check(f"int4 against {peer}: {phase}", f"{phase}_rate", NO_CUT_INT4, peer, limit, EVERYWHERE)
        for peer in (OPENVINO_INT4, LLAMA_CPP)
        for phase, limit in (("prefill", 1.5), ("decode", 1.0))
    ),
    *(
        Check(f"{name}: share of the floor, {phase}", f"{phase}_share", name, None, limit, workloads)
        for name in (NO_CUT, CUT_4WAY)
        for phase, limit, workloads in (("prefill", 0.75, EVERYWHERE), ("decode", 0.70, BATCHES))
    ),
)


def make_report(lines: list[Line]) -> dict[str, Any]:
    """Return ``rows`` (medians of each workload and system), ``checks``, and the medians of the ``rates``."""
    runs = with_floors(lines)
    rates = [line["rates"] for line in lines if "rates" in line]
    return {
        "rates": {name: statistics.median(entry[name] for entry in rates) for name in rates[0]} if rates else {},
        "rows": [row_of(own) for own in group(runs).values()],
        "same_first_token": {name: share for name in PLAIN if (share := same_first_token(name, runs)) is not None},
        "checks": [result for check in CHECKS for result in results_of(check, runs)],
    }


def with_floors(lines: list[Line]) -> list[Line]:
    """Return the runs, with the floors and shares of their phases at the rates measured last before them or first after
    them, whichever are better."""
    runs: list[Line] = []
    measured = [(index, Rates(**line["rates"])) for index, line in enumerate(lines) if "rates" in line]
    for index, line in enumerate(lines):
        if "system" in line:
            before, after = ([r for i, r in measured if i < index], [r for i, r in measured if i > index])
            rates = best_rates(*before[-1:], *after[:1]) if measured else None
            run = {**line, "prefill_rate": 1 / line["prefill_s"]}
            if line["decode_s"]:
                run["decode_rate"] = line["decode_steps"] / line["decode_s"]
            for phase in ("prefill", "decode"):
                if rates and line.get(f"{phase}_work") and line[f"{phase}_s"]:
                    run[f"{phase}_floor_s"] = Work(**line[f"{phase}_work"]).floor_s(rates)
                    run[f"{phase}_share"] = run[f"{phase}_floor_s"] / line[f"{phase}_s"]
            runs.append(run)
    return runs


def group(runs: list[Line]) -> dict[tuple[str, str], list[Line]]:
    """Runs by (workload, system), in the order of their first appearance."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for run in runs:
        groups.setdefault((run["workload"], run["system"]), []).append(run)
    by_workload = list(dict.fromkeys(workload for workload, _ in groups))
    return dict(sorted(groups.items(), key=lambda item: by_workload.index(item[0][0])))


METRICS = (
    *("combined_tok_s", "ttft_s", "total_s", "prefill_s", "prefill_floor_s", "prefill_share"),
    *("decode_s", "decode_floor_s", "decode_share"),
)


def row_of(runs: list[Line]) -> Line:
    """Return the medians of one system's runs of one workload."""
    row: Line = {key: runs[0][key] for key in ("workload", "system", "decode_steps")}
    row["rounds"] = len(runs)
    row |= {name: statistics.median(r[name] for r in runs) for name in METRICS if all(name in run for run in runs)}
    return row | {"runs_total_s": [run["total_s"] for run in runs]}


def same_first_token(system: str, runs: list[Line]) -> float | None:
    """Return the share of requests whose first token is transformers'; None where both ran nothing alike. Near 1 where
    the weights are the same: random weights leave many near-ties, which rounding decides."""
    theirs = {(r["round"], r["workload"]): r["first_tokens"] for r in runs if r["system"] == TRANSFORMERS}
    pairs = [
        own == other
        for run in runs
        if run["system"] == system and (run["round"], run["workload"]) in theirs
        for own, other in zip(run["first_tokens"], theirs[run["round"], run["workload"]], strict=True)
    ]
    return sum(pairs) / len(pairs) if pairs else None


def results_of(check: Check, runs: list[Line]) -> list[Line]:
    """Return a check's result on every workload where both systems were run: the median over the rounds."""
    groups, results = group(runs), []
    for workload in check.workloads:
        own = {run["round"]: run for run in groups.get((workload, check.system), [])}
        if check.other is not None:
            others = {run["round"]: run for run in groups.get((workload, check.other), [])}
            values = [own[index][check.metric] / others[index][check.metric] for index in own if index in others]
        else:
            values = [run[check.metric] for run in own.values() if check.metric in run]
        if values:
            middle = statistics.median(values)
            passed = middle <= check.limit if check.at_most else middle >= check.limit
            entry = dataclasses.asdict(check) | {"workload": workload, "value": middle, "rounds": len(values)}
            entry.pop("workloads")
            results.append(entry | {"passed": passed})
    return results
