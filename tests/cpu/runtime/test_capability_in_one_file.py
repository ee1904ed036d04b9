"""A policy with a capability that others have is one file: build, planner, scheduler, steps and reports take it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from kvforge.cli import main
from kvforge.common.errors import BuildError
from kvforge.compiler import BuildOptions
from kvforge.compiler.options import resolve
from kvforge.kv_policies import Full, OwnerCache, parse, policies
from kvforge.kv_policies.capabilities.host_tier import HostTier
from kvforge.kv_policies.capabilities.keeping import Keeping
from kvforge.kv_policies.capabilities.probing import Probing
from kvforge.kv_policies.policy import BASIC_NEEDS, KVPolicy, Need
from kvforge.kv_policies.state import EngineMemory, NoState
from kvforge.manifest.check import is_possible
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.cache_capacity import cache_shape
from kvforge.serving.stub.metric_tables import policy_counters
from tests.support.sessions.fake import FakeSession, fake_manifest


@dataclass(frozen=True)
class Asking(Keeping, Probing, HostTier, KVPolicy):
    """Asks about a prompt at its end, ``questions`` times, and changes nothing."""

    questions: int = 2

    name: ClassVar[str] = "asking"
    title: ClassVar[str] = "questions"
    needs: ClassVar[frozenset[Need]] = BASIC_NEEDS | {Need.ONE_QUERY}
    texts: ClassVar[tuple[str, ...]] = ("What?",)
    counters: ClassVar[Mapping[str, str]] = {"asked": "Prompts that were asked about"}
    report_columns: ClassVar[tuple[tuple[str, str, int, str], ...]] = (("asked", "asked", 6, ""),)

    device_bytes = Full.device_bytes
    device_bytes_read = Full.device_bytes_read

    def host_bytes(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        return 8 * num_prompt_tokens

    def next_transition(self, num_prompt_tokens: int, num_computed: int) -> int | None:
        return num_prompt_tokens if num_computed <= num_prompt_tokens else None

    def num_probes(self, num_prompt_tokens: int) -> int:
        return self.questions

    def tokens(self, tokens: Sequence[int], texts: Sequence[Sequence[int]], index: int) -> list[int]:
        return [*texts[0], 3 + index]

    def inputs(self, state_table: Any, num_queries: int, num_scored: int) -> tuple[Any, ...]:
        return ()

    def num_scratch_pages(self, page_size: int) -> int:
        return 8

    def make_state(self, memory: EngineMemory) -> "Asked":
        return Asked()

    def report(self, counters: Mapping[str, int]) -> dict[str, float]:
        return {"asked": counters["asked"]}


class Asked(NoState):
    count = 0

    def apply(self, transitions: Sequence[Any]) -> None:
        self.count += len(transitions)

    def counters(self) -> dict[str, int]:
        return {"asked": self.count}


class Probed(FakeSession):
    """Notes the probes, whose last token says which one it is."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.probes: list[int] = []

    def lower(self, step: Any, pools: Any) -> Any:
        if step.input_ids[:2].tolist() == [60, 61]:
            self.probes.append(int(step.input_ids[-1]) - 3)
        return super().lower(step, pools)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(policies(), Asking.name, Asking)


def tokens_of(policy: KVPolicy, prompts: Mapping[str, list[int]]) -> tuple[dict[str, list[int]], LLMEngine, Probed]:
    texts = {} if policy.probing is None else {"policy_texts": ((60, 61),)}
    session = Probed(kv_policy=policy.name, kv_policy_parameters=policy.parameters, **texts)
    engine = LLMEngine(session=session, num_pages=40, max_num_tokens=16)
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    while engine.has_unfinished():
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
        engine.check_invariants()
    return tokens, engine, session


def test_scheduler_steps_and_metrics_take_it() -> None:
    """Every prompt gets its probes in order, one a step; pages and tokens are those of full attention."""
    prompts = {f"r{n}": [3 + (n * index) % 50 for index in range(n)] for n in (1, 6, 8, 23)}
    policy = parse("asking:questions=3")
    tokens, engine, session = tokens_of(policy, prompts)
    assert tokens == tokens_of(Full(), prompts)[0]
    assert session.probes == 4 * [0, 1, 2]
    assert engine.scheduler.transitions.num_planned == len(prompts) == engine.stats()["num_asked"]
    assert policy_counters(policy)["kvforge_asking_asked_total"][0](engine.stats()) == len(prompts)
    assert policy.keeping.report({"asked": 4}) == {"asked": 4}
    with pytest.raises(BuildError, match="the KV policy asking has no parameter 'question'; it has questions"):
        parse("asking:question=3")


def test_build_takes_it() -> None:
    """Its name and parameters, what it does not go with, and the ids of its questions."""
    config = fake_manifest().model
    assert resolve(BuildOptions(kv_policy="asking:questions=3"), config, "BF16").policy == Asking(3)
    with pytest.raises(BuildError, match="--kv-policy asking needs one query per sequence and step, but with specul"):
        resolve(BuildOptions(kv_policy="asking", max_draft_len=2), config, "BF16")
    parameters = {"isa": ("x86-64",), "kv_policy": "asking", "kv_policy_parameters": {"questions": 2}}
    manifest = fake_manifest(**parameters, policy_texts=((60, 61),))
    assert is_possible(manifest) and not is_possible(fake_manifest(**parameters))
    assert cache_shape(manifest, 4, 32).scratch_pages == 8 and not manifest.has_observers


def test_planner_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "--model", "llama-3.1-8b", "--kv-policy", "asking:questions=3", "--input", "1000", "--json"]) == 0
    )
    row = json.loads(capsys.readouterr().out)["kv_policy"]["variants"][0]
    assert row["host_bytes"] == 32 * 8 * 1000 and row["times_smaller"] == 1
