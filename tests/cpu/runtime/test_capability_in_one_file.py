"""A policy with a capability that others have is one file: build, planner, scheduler, steps and reports take it."""

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest

from kvforge.cli import main
from kvforge.common.errors import BuildError
from kvforge.compiler import BuildOptions
from kvforge.compiler.options import resolve
from kvforge.kv_policies import Full, KVPolicy, parse, policies
from kvforge.kv_policies.capabilities import HostTier, Keeping, Probing
from kvforge.kv_policies.policy import BASIC_NEEDS, Need
from kvforge.kv_policies.state import NoState
from kvforge.manifest.check import is_possible
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.cache_capacity import cache_shape
from kvforge.serving.stub.metric_tables import policy_counters
from tests.support.sessions.fake import FakeSession, fake_manifest

QUESTION = (60, 61)


@dataclass(frozen=True)
class Asking(Keeping, Probing, HostTier, KVPolicy):
    """Asks about a prompt at its end, ``questions`` times, and changes nothing."""

    questions: int = 2

    name: ClassVar = "asking"
    title: ClassVar = "questions"
    needs: ClassVar = BASIC_NEEDS | {Need.ONE_QUERY}
    texts: ClassVar = ("What?",)
    counters: ClassVar = {"asked": "Prompts that were asked about"}

    device_bytes = Full.device_bytes
    device_bytes_read = Full.device_bytes_read

    def host_bytes(self, cache, num_prompt_tokens, num_generated_tokens=0):
        return 8 * num_prompt_tokens

    def next_transition(self, num_prompt_tokens, num_computed):
        return num_prompt_tokens if num_computed <= num_prompt_tokens else None

    def num_probes(self, num_prompt_tokens):
        return self.questions

    def tokens(self, tokens, texts, index):
        return [*texts[0], 3 + index]

    def inputs(self, state_table, num_queries, num_scored):
        return ()

    def num_scratch_pages(self, page_size):
        return 8

    def make_state(self, memory):
        return Asked()

    def report(self, counters):
        return {"asked": counters["asked"]}


class Asked(NoState):
    count = 0

    def apply(self, transitions):
        self.count += len(transitions)

    def counters(self):
        return {"asked": self.count}


class Probed(FakeSession):
    """Notes the probes, whose last token says which one it is."""

    probes: ClassVar[list[int]] = []

    def lower(self, step, pools):
        if step.input_ids[:2].tolist() == [*QUESTION]:
            self.probes.append(int(step.input_ids[-1]) - 3)
        return super().lower(step, pools)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(policies(), Asking.name, Asking)


def run(policy, prompts):
    texts = (QUESTION,) if policy.probing else ()
    session = Probed(kv_policy=policy.name, kv_policy_parameters=policy.parameters, policy_texts=texts)
    engine = LLMEngine(session=session, num_pages=40, max_num_tokens=16)
    tokens = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    while engine.has_unfinished():
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
        engine.check_invariants()
    return tokens, engine.stats()


def test_scheduler_steps_and_reports_take_it() -> None:
    """Every prompt gets its probes in order, one a step; pages and tokens are those of full attention."""
    prompts = {f"r{n}": [3 + (n * index) % 50 for index in range(n)] for n in (1, 6, 8, 23)}
    policy = parse("asking:questions=3")
    tokens, stats = run(policy, prompts)
    assert tokens == run(Full(), prompts)[0] and Probed.probes == 4 * [0, 1, 2]
    assert stats["num_transitions"] == stats["num_asked"] == 4
    assert policy_counters(policy)["kvforge_asking_asked_total"][0](stats) == 4
    assert policy.keeping.report({"asked": 4}) == {"asked": 4}


def test_build_takes_it() -> None:
    """Its name and parameters, what it does not go with, and the ids of its questions."""
    config = fake_manifest().model
    assert resolve(BuildOptions(kv_policy="asking:questions=3"), config, "BF16").policy == Asking(3)
    with pytest.raises(BuildError, match="--kv-policy asking needs one query per sequence and step, but with specul"):
        resolve(BuildOptions(kv_policy="asking", max_draft_len=2), config, "BF16")
    parameters = {"isa": ("x86-64",), "kv_policy": "asking", "kv_policy_parameters": {"questions": 2}}
    manifest = fake_manifest(**parameters, policy_texts=(QUESTION,))
    assert is_possible(manifest) and not is_possible(fake_manifest(**parameters))
    assert cache_shape(manifest, 4, 32).scratch_pages == 8 and not manifest.has_observers


def test_planner_takes_it(capsys) -> None:
    arguments = ["--model", "llama-3.1-8b", "--kv-policy", "asking:questions=3", "--input", "1000", "--json"]
    assert main(["plan", *arguments]) == 0
    row = json.loads(capsys.readouterr().out)["kv_policy"]["variants"][0]
    assert row["host_bytes"] == 32 * 8 * 1000 and row["times_smaller"] == 1
