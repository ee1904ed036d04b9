"""Steps of a designed size on a real engine: the measurements that prices are fitted to."""

import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from kvforge.common.errors import KvforgeError
from kvforge.kv_policies import Need
from kvforge.manifest import Manifest
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.scheduling.slot_table import SlotTable
from kvforge.runtime.step.flight import Flight
from perf.simulation.cost_model import CostModel, fit_prices
from perf.simulation.work import StepWork, step_work

_MARGIN = 8
"""Tokens by which sequences grow while a step is measured, at most."""


@dataclass(frozen=True)
class Design:
    """A step to measure: ``num_decodes`` sequences of ``context`` tokens generate one token each, while ``chunk``
    tokens of a prompt of which ``past`` are computed are computed, to its end if ``is_last``."""

    num_decodes: int
    context: int
    chunk: int = 0
    past: int = 0
    is_last: bool = False


@dataclass(frozen=True)
class Sample:
    """A measured step."""

    work: StepWork
    seconds: float


class _NullRunner:
    """Stands in for the engine's runner while sequences are brought to where a measurement begins: every token is 0,
    and nothing is written to the cache."""

    def __init__(self, vocab_size: int) -> None:
        self._logits = torch.zeros(1, vocab_size)

    def change(self, plan: Schedule) -> None:
        """Nothing: no cache changes on the engines that are measured."""

    def run(self, plan: Schedule, slots: SlotTable, flight: Flight | None = None) -> torch.Tensor | None:
        num_rows = len(plan.survivors)
        return self._logits.expand(num_rows, -1) if num_rows else None


class _Recorder:
    """The engine's runner, noting the work of the last step."""

    def __init__(self, engine: LLMEngine) -> None:
        self._runner, self._manifest = engine.runner, engine.manifest
        self.work: StepWork | None = None

    def change(self, plan: Schedule) -> None:
        self._runner.change(plan)

    def run(self, plan: Schedule, slots: SlotTable, flight: Flight | None = None) -> torch.Tensor | None:
        self.work = step_work(plan, self._manifest.model.num_layers, self._manifest.model.cut)
        return self._runner.run(plan, slots, flight)


class StepMeter:
    """Brings an engine to the beginning of a designed step without computing, then measures the step. Between
    measurements the engine has its own runner.

    Raises:
        KvforgeError: the engine's steps have work, or its sequences memory, that a ``CostModel`` does not count.
    """

    def __init__(self, engine: LLMEngine) -> None:
        _check_is_modelled(engine.manifest)
        self.engine = engine
        self._null: Any = _NullRunner(engine.config.vocab_size)
        self._recorder: Any = _Recorder(engine)
        self._count = 0
        for pool in engine.runner.pools:
            for tensor in pool:  # zeros that were never written are one physical page, which is always cached
                tensor.copy_(torch.randn(tensor.shape[1:]).clamp(-2, 2))

    def fits(self, design: Design) -> bool:
        """The engine's limits allow the step, and its cache the sequences."""
        config = self.engine.config
        lengths = [design.context] * design.num_decodes
        lengths += [design.past + design.chunk] if design.chunk else []
        pages = sum(self.engine.scheduler.pages_for(length + _MARGIN) + 1 for length in lengths)
        return (
            len(lengths) <= config.max_num_seqs
            and max(lengths) + _MARGIN <= config.max_seq_len
            and pages <= config.num_pages
            and design.num_decodes + design.chunk <= config.max_num_tokens
        )

    def measure(self, design: Design) -> Sample:
        """Return the step's work and the median of its times: three, each a token further, or two of a long step."""
        decodes, seconds = [self._add(design.context) for _ in range(design.num_decodes)], []
        if decodes:
            self._step(self._null, design.num_decodes * design.context)
        for _ in range(2 if design.chunk >= 500 else 3):
            prompt = self._add(design.past + design.chunk + (not design.is_last)) if design.chunk else None
            if prompt and design.past:
                self._step(self._null, design.num_decodes + design.past)
            seconds.append(self._step(self._recorder, design.num_decodes + design.chunk))
            if prompt:
                self.engine.abort(prompt)
        for request in decodes:
            self.engine.abort(request)
        work = self._recorder.work
        if work.tokens != design.num_decodes + design.chunk:
            raise AssertionError(f"{design} became {work}")
        return Sample(work, float(np.median(seconds)))

    def _add(self, num_tokens: int) -> str:
        self._count += 1
        prompt = [0] * num_tokens
        self.engine.add_request(str(self._count), prompt, SamplingParams(max_tokens=_MARGIN, ignore_eos=True))
        return str(self._count)

    def _step(self, runner: Any, num_tokens: int) -> float:
        """Run a step of up to ``num_tokens`` tokens; returns its seconds."""
        engine, scheduler = self.engine, self.engine.scheduler
        own, config = engine.runner, scheduler.config
        engine.runner, scheduler.config = runner, replace(config, max_num_tokens=num_tokens)
        try:
            started = time.perf_counter()
            outputs = engine.step()
            seconds = time.perf_counter() - started
        finally:
            engine.runner, scheduler.config = own, config
        if any(output.finish_reason == "error" for output in outputs):
            raise KvforgeError(f"a measured step failed: {outputs[0].stop_reason}.")
        return seconds


def _check_is_modelled(manifest: Manifest) -> None:
    model = manifest.model
    not_modelled = {
        "sliding windows": any(model.layer_windows),
        "" if model.linear is None else model.linear.title: model.linear is not None,
        "a blind cut": model.is_blind,
        "prompts that another model predicts": manifest.predicts,
        f"the KV policy {manifest.kv_policy}": Need.OWN_CACHE in manifest.policy.needs,
        f"a cache of {manifest.kv_dtype}": manifest.policy.sealing is not None,
    }
    for what, is_there in not_modelled.items():
        if is_there:
            raise KvforgeError(f"steps and memory of engines with {what} are not modelled; fit another engine.")


def training_designs() -> list[Design]:
    """A grid of decode steps, prompt chunks and both together."""
    designs = [Design(n, context) for n in (1, 2, 4, 8, 16, 32, 64) for context in (32, 500, 1000, 2000)]
    for past in (0, 1000):
        for chunk in (16, 64, 256, 1000, 2000):
            designs.append(Design(0, 0, chunk, past))
        designs.append(Design(0, 0, 256, past, is_last=True))
        designs += [Design(n, 500, chunk, past) for n in (4, 32) for chunk in (32, 256)]
    return designs


def held_out_designs(num: int, seed: int) -> list[Design]:
    """Steps drawn at random from the grid's range; every other one computes a chunk too."""
    rng = np.random.default_rng(seed)

    def draw(low: int, high: int) -> int:
        return int(np.exp(rng.uniform(np.log(low), np.log(high))))

    return [
        Design(draw(1, 64), draw(32, 1500), *((draw(16, 1000), draw(1, 1000), bool(rng.integers(2))) if i % 2 else ()))
        for i in range(num)
    ]


REFERENCE_DESIGNS = (
    Design(1, 500), Design(8, 500), Design(8, 1500), Design(0, 0, 256), Design(0, 0, 1000), Design(8, 500, 256),
)  # fmt: skip
"""A few steps that tell how fast the machine is now."""


def slowness(meter: StepMeter, model: CostModel) -> float:
    """Return how long steps take now, as a multiple of what they should: the median over ``REFERENCE_DESIGNS``.

    Raises:
        KvforgeError: the engine's limits allow none of them.
    """
    samples = [meter.measure(design) for design in REFERENCE_DESIGNS if meter.fits(design)]
    if not samples:
        raise KvforgeError("no reference step fits the engine; build it with a --max-seq-len of 300 or more.")
    return float(np.median([sample.seconds / model.seconds(sample.work) for sample in samples]))


def fit_engine(engine: LLMEngine, seed: int = 0) -> tuple[CostModel, dict[str, Any]]:
    """Return the prices of an engine's steps and how well they tell steps that they were not fitted to."""
    meter = StepMeter(engine)
    training = [design for design in training_designs() if meter.fits(design)]
    held_out = [design for design in held_out_designs(40, seed) if meter.fits(design)][:16]
    meter.measure(training[0])
    order = np.random.default_rng(seed).permutation(len(training) + len(held_out))
    samples: dict[int, Sample] = {}
    for i in tqdm(order.tolist(), unit="step", disable=None):
        samples[i] = meter.measure((training + held_out)[i])
    known = [samples[i] for i in range(len(training))]
    prices = fit_prices([sample.work for sample in known], [sample.seconds for sample in known])
    manifest = engine.manifest
    model = CostModel(manifest.model.num_layers, manifest.model.cut, manifest.page_size, manifest.page_bytes, prices)
    new = [samples[i] for i in range(len(training), len(samples))]
    return model, {
        "num_steps": len(known),
        "num_held_out": len(new),
        "fit_error": _errors(model, known),
        "held_out_error": _errors(model, new),
        "steps": [
            {**asdict(design), "seconds": samples[i].seconds, "predicted": model.seconds(samples[i].work)}
            for i, design in enumerate(training + held_out)
        ],
    }


def _errors(model: CostModel, samples: list[Sample]) -> dict[str, float]:
    """Relative errors of single steps, without sign, and of the time of all of them together."""
    predicted = np.array([model.seconds(sample.work) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    relative = np.abs(predicted / seconds - 1)
    return {
        "median": float(np.median(relative)),
        "max": float(relative.max()),
        "total": float(predicted.sum() / seconds.sum() - 1),
    }
