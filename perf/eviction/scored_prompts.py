"""What KVzap adds to a prompt: scores as K and V are written, and the eviction behind it, beside the full cache.

    python -m perf.eviction.scored_prompts [--units 0 128] [--input-tokens 2048 8192] [--rounds 8] [--clock cpu]

The 213M-parameter model with random scorers, linear ones (0) or with hidden units; half of a prompt's tokens stay. In
each round every engine computes the same prompt, by turns of a step, each time in another order. "Prompt" is the time
until the first token over the full cache's, "eviction" what the next step takes longer than the full cache's, over the
full cache's prompt: medians of rounds with 95% intervals by bootstrap. --clock cpu goes with OMP_NUM_THREADS=1.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.checkpoint.scorer import write_scorer
from kvforge.compiler import BuildOptions
from kvforge.runtime.engine import LLMEngine
from model_defs.token_scores import scorer_specs
from perf.harness.batch import Batch
from perf.harness.engines import cached_engine
from perf.harness.experiment import Experiment, Row, interval, number, numbers, option, output, work
from perf.harness.policy_engines import with_parameters
from perf.harness.random_checkpoint import LLAMA_213M, cached_checkpoint
from perf.harness.rounds import median_interval, turned
from perf.speculation.suffix import CLOCKS


def random_scorer(path: Path, checkpoint: Path, units: int) -> Path:
    """Write a scorer for ``checkpoint``, weights normal with standard deviation 1/sqrt(fan-in); returns ``path``."""
    model = replace(read_model_config(open_model(checkpoint)), kv_scorer=units)
    generator = torch.Generator().manual_seed(0)
    sources = [source for spec in scorer_specs(model) for source in spec.sources]
    drawn = {one.name: torch.randn(one.shape, generator=generator) / one.shape[-1] ** 0.5 for one in sources}
    path.mkdir(parents=True, exist_ok=True)
    write_scorer(path, model, units, drawn)
    return path


def load(args: argparse.Namespace, units: int | None, length: int) -> LLMEngine:
    """Load the engine for prompts of ``length`` tokens with scorers of so many hidden units; None: the full cache."""
    checkpoint, longest = cached_checkpoint(args.work / "checkpoint", LLAMA_213M), max(args.input_tokens)
    options = BuildOptions(max_num_seqs=1, max_num_tokens=512, max_seq_len=longest + 2)
    folder = args.work / f"scored-prompts-{longest}-{'full' if units is None else units}"
    if units is None:
        engine = cached_engine(folder, checkpoint, options)
    else:
        scorer = random_scorer(args.work / f"scorer-{units}", checkpoint, units)
        largest, policy = (f"kvzap:budget={tokens // 2},block=64,threshold=0,window=64" for tokens in (longest, length))
        built = cached_engine(folder, checkpoint, replace(options, kv_policy=largest, kv_scorer=str(scorer)))
        engine = with_parameters(built, built.with_name(f"{built.name}-{length}"), policy)
    return LLMEngine(engine, enable_prefix_cache=False, kv_cache_gib=1.0)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each length and scorer."""
    clock = CLOCKS[args.clock]
    for length in args.input_tokens:
        engines = {units: load(args, units, length) for units in (None, *args.units)}
        rng, prompt_s, next_s = (
            np.random.default_rng(0),
            list[dict[int | None, float]](),
            list[dict[int | None, float]](),
        )
        for index in range(args.rounds + 1):
            prompt = rng.integers(3, LLAMA_213M["vocab_size"], (1, length)).tolist()
            running = {units: Batch(engine, prompt, 2) for units, engine in engines.items()}
            spent, num_steps = dict.fromkeys(engines, 0.0), 0
            while not all(one.num_finished for one in running.values()):
                if all(one.tokens[0] for one in running.values()):
                    prompt_s.append(spent)
                    spent = dict.fromkeys(engines, 0.0)
                num_steps += 1
                for units in turned([*engines], index + num_steps):
                    begin = clock()
                    running[units].step()
                    spent[units] += clock() - begin
            next_s.append(spent)
        for units in args.units:
            pairs = list(zip(prompt_s[1:], next_s[1:], strict=True))  # the first round warms up
            yield {
                "input_tokens": length,
                "units": units,
                "full_prompt_s": float(np.median([prompt[None] for prompt, _ in pairs])),
                "prompt": median_interval([prompt[units] / prompt[None] for prompt, _ in pairs]),
                "eviction": median_interval([(step[units] - step[None]) / prompt[None] for prompt, step in pairs]),
            }


EXPERIMENT = Experiment(
    "perf.eviction.scored_prompts", __doc__,
    options=(
        option("--units", type=int, nargs="+", default=[0, 128], help="(default 0 128)"),
        numbers("--input-tokens", [2048, 8192]), number("--rounds", 8, "behind the first (default %(default)s)"),
        option("--clock", choices=tuple(CLOCKS), default="wall", help="(default %(default)s)"),
        work("runs/scored-prompts", "checkpoint and engines"), output("OUTPUT.json and OUTPUT.md"),
    ),
    measure=measure, settings=("rounds", "clock"), title="What KVzap adds to a prompt",
    notes="213M parameters, bf16, random scorers with so many hidden units (0: linear), half of the tokens stay; "
    "medians of {rounds} rounds by turns of a step, {clock} time.",
    columns=(
        ("tokens", "input_tokens"), ("units", "units"), ("full cache s", "full_prompt_s", ".2f"),
        ("prompt", lambda row: interval(row["prompt"], 3)),
        ("eviction", lambda row: interval(row["eviction"], 1, 100, "+") + "%"),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
