"""Engines with KV policies on the GPU against those on the CPU: which tokens are kept, read and given."""

import dataclasses

import pytest
import torch

from kvforge.runtime import LLMEngine
from tests.support.cuda.sessions import session_on
from tests.support.models.engines import SHADOWKV, SWIFTKV, EngineSpec
from tests.support.models.shelf import EngineShelf
from tests.support.schedules.engine_schedules import random_plan, run_plan

PLAIN = EngineSpec("llama", model=(("num_hidden_layers", 3),), options=SWIFTKV.options)


def with_policy(spec: EngineSpec, policy: str) -> EngineSpec:
    return dataclasses.replace(spec, options=dataclasses.replace(spec.options, kv_policy=policy))


SPECS = {
    "shadowkv": SHADOWKV,
    "streaming": with_policy(SWIFTKV, "streaming:budget=12,sinks=3"),
    "keydiff": with_policy(SWIFTKV, "keydiff:budget=13,block=3"),
    "snapkv": with_policy(SWIFTKV, "snapkv:budget=12,window=5"),
    "h2o": with_policy(PLAIN, "h2o:budget=12"),
}


@pytest.mark.parametrize("name", SPECS)
def test_schedules_give_the_cpu_engines_tokens(name: str, engines: EngineShelf, gpu: torch.device) -> None:
    """Arrivals, chunks, preemptions, prefix hits and aborts, greedy in fp32."""
    cuda, cpu = (session_on(engines, SPECS[name], target) for target in ("cuda", "cpu"))
    page_size = SPECS[name].options.page_size
    for seed in range(8):
        plan = random_plan(seed, page_sizes=(page_size,), max_prompt=80, sampled=False)
        expected = run_plan(LLMEngine(session=cpu, **plan.limits), plan)
        assert run_plan(LLMEngine(session=cuda, **plan.limits), plan) == expected, seed
