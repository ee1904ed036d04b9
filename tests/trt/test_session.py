"""The TensorRT session around plans that record what they are given, on the CPU."""

import dataclasses

import pytest
import torch

from kvforge.common.errors import EngineError
from kvforge.kv_policies import parse
from kvforge.manifest import Manifest
from kvforge.runtime.sessions.inputs import LowerStep, VerifyStep
from kvforge.runtime.step.batch import StepBatch
from tests.support.cuda.fake_stream import FakeStream, fake_current_stream
from tests.support.sessions.fake import fake_manifest

HIDDEN, VOCAB, PAGES = 6, 11, 40
CPU = torch.device("cpu")


class RecordingPlan:
    """Takes the given inputs and pools; fills its first output with ones."""

    workspace_bytes = 128

    def __init__(self, inputs, outputs, dtypes):
        self.inputs, self.outputs, self.dtypes, self.calls = inputs, outputs, dtypes, []
        self.is_repeated, self.repeated, self.num_kept = False, [], 0

    def make_contexts(self, workspace, stream):
        assert workspace.numel() >= self.workspace_bytes

    def largest(self, name, dim):
        assert name.startswith(("k_", "v_", "mass_"))
        return PAGES

    def keep_kernels(self):
        self.num_kept += 1

    def run(self, inputs, outputs, stream, nothing):
        self.calls.append((dict(inputs), dict(outputs)))
        self.repeated.append(self.is_repeated)
        next(iter(outputs.values())).fill_(1)


def make_plan(graph: str, owners: tuple[int, ...], results: dict[str, torch.dtype], step_types=None) -> RecordingPlan:
    from kvforge.tensorrt.graph_tensors import INPUTS

    pools = [f"{kind}_pool_{owner}" for owner in owners for kind in "kv"]
    written = [f"{name}_out" for name in pools] if graph == "lower" else []
    dtypes = dict.fromkeys(INPUTS[graph], torch.int32) | (step_types or {}) | results
    dtypes |= dict.fromkeys((*pools, *written), torch.bfloat16)
    return RecordingPlan((*INPUTS[graph], *pools), (*results, *written), dtypes)


@pytest.fixture
def manifest() -> Manifest:
    return fake_manifest(
        dtype="bfloat16", kv_dtype="bfloat16", num_layers=4, cut=2, group_size=2, hidden_size=HIDDEN, vocab_size=VOCAB,
        page_size=4, num_heads=2, num_kv_heads=2, head_dim=8, max_num_seqs=4, max_draft_len=2, max_seq_len=64,
    )  # fmt: skip


@pytest.fixture
def session(trt, manifest, monkeypatch):
    from kvforge.runtime.sessions import tensorrt as tensorrt_session

    f32, bf16, i32 = torch.float32, torch.bfloat16, torch.int32
    floats = dict.fromkeys(("logits", "draft_probs", "temperature", "uniform"), f32)
    plans = {
        "lower": make_plan("lower", (0, 1, 2), {"hidden": bf16}),
        "upper": make_plan("upper", (2,), {"logits": f32}, {"hidden": bf16}),
        "verify": make_plan("verify", (), {"accepted": i32, "next_token": i32}, floats),
    }
    fake_current_stream(monkeypatch)
    return tensorrt_session.TensorRTSession(manifest, plans, FakeStream(), CPU)


@pytest.fixture
def observing(trt, manifest, monkeypatch):
    """A session whose KV policy observes attention: each layer's graph writes `mass` of the owner that it reads."""
    from kvforge.runtime.sessions import tensorrt as tensorrt_session

    policy = parse("snapkv:budget=40,window=4")
    manifest = dataclasses.replace(manifest, kv_policy=policy.name, kv_policy_parameters=policy.parameters)
    f32, bf16 = torch.float32, torch.bfloat16
    plans = {
        "lower": make_plan("lower", (0, 1, 2), {"hidden": bf16}),
        "upper": make_plan("upper", (2,), {"logits": f32}, {"hidden": bf16}),
    }
    for graph, owners in (("lower", (0, 1)), ("upper", (2,))):
        plan, names = plans[graph], [f"mass_{owner}" for owner in owners]
        state = [one.name for one in policy.keeping.state_inputs]
        plan.inputs = (*plan.inputs, *names, *state)
        plan.outputs = (*plan.outputs, *(f"{name}_out" for name in names))
        plan.dtypes |= dict.fromkeys((*names, *(f"{name}_out" for name in names)), f32)
        plan.dtypes |= dict.fromkeys(state, torch.int32)
    fake_current_stream(monkeypatch)
    return tensorrt_session.TensorRTSession(manifest, plans, FakeStream(), CPU)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


STEP = LowerStep(int32(5), int32(5), int32(5), int32(3), int32(2), int32(2, 3))
"""Five tokens of two sequences."""


def test_a_step(session):
    """Lower writes the pools of all owners, upper reads those above the cut; logits come back."""
    pools = session.allocate_pools(9)
    assert len(pools) == 3 and pools[0][0].shape == (9, 4, 2, 8)
    flat = [tensor for pool in pools for tensor in pool]
    hidden = session.lower(STEP, pools)
    assert hidden.shape == (5, HIDDEN) and hidden.dtype == torch.bfloat16
    inputs, outputs = session._plans["lower"].calls[0]
    assert all(given is tensor for given, tensor in zip(list(inputs.values())[6:], flat, strict=True))
    assert all(given is tensor for given, tensor in zip(list(outputs.values())[1:], flat, strict=True))
    logits = session.upper(StepBatch(STEP, int32(2), int32(3)).upper(hidden), pools)
    assert logits.shape == (2, VOCAB) and logits.dtype == torch.float32 and bool((logits == 1).all())
    inputs, outputs = session._plans["upper"].calls[0]
    assert [inputs["k_pool_2"], inputs["v_pool_2"]] == [*pools[2]] and list(outputs) == ["logits"]
    own, callers = session._lower._stream, torch.cuda.current_stream()
    assert own.waited == [callers] * 2 and callers.waited == [own] * 2, (
        "each graph comes after what the caller gathered"
    )


def test_what_a_kv_policy_keeps(observing):
    """Statistics of the owners that a graph reads go in and out at one address; without observed queries the policy's
    inputs are neutral."""
    pools = observing.allocate_pools(9, state_pages=7)
    assert [tuple(tensor.shape[:1]) for tensor in pools[0]] == [(9,), (9,), (7,), (7,)]
    step = STEP._replace(state=(int32(2, 3), int32(2) + 1, int32(2)))
    for given, table in ((step, step.state[0]), (STEP, torch.full((2, 1), -1))):
        observing.lower(given, pools)
        inputs, outputs = observing._plans["lower"].calls[-1]
        for owner in (0, 1):
            assert inputs[f"mass_{owner}"] is outputs[f"mass_{owner}_out"] is pools[owner][3]
        assert not {"position_0", "mass_2"} & inputs.keys() and torch.equal(inputs["state_table"], table.int())
    hidden = torch.zeros(5, HIDDEN, dtype=torch.bfloat16)
    observing.upper(StepBatch(step, int32(2), int32(3)).upper(hidden), pools)
    inputs, outputs = observing._plans["upper"].calls[-1]
    assert outputs["mass_2_out"] is pools[2][3] and {"state_table", "observed", "scored"} <= inputs.keys()
    with pytest.raises(EngineError, match=f"at most {PAGES} pages, not {PAGES + 1}"):
        observing.allocate_pools(9, state_pages=PAGES + 1)


def decode_step(lengths: list[int]) -> LowerStep:
    """One token of each sequence."""
    count = len(lengths)
    starts, length = torch.arange(count + 1).int(), torch.tensor(lengths).int()
    return LowerStep(int32(count) + 1, length - 1, int32(count) + 2, starts, length, int32(count, 3))


def test_steps_of_generated_tokens_are_repeated_runs(session, manifest):
    """Padded to few sizes, always at the same addresses, in the context that records; other steps are not."""
    from kvforge.runtime.sessions.tensorrt import RepeatedRuns, TensorRTSession

    plans = session._plans
    session = TensorRTSession(manifest, plans, FakeStream(), CPU, capture=RepeatedRuns(plans.values()))
    lower, pools = plans["lower"], session.allocate_pools(9)
    session.lower(STEP, pools)
    assert not lower.repeated[-1] and session.captures_steps
    seen = []
    for lengths in ([3, 4, 5], [5, 6, 7], [4, 4, 4, 4]):
        hidden = session.lower(decode_step(lengths), pools)
        assert hidden.shape == (len(lengths), HIDDEN) and bool((hidden == 1).all())
        inputs, _ = lower.calls[-1]
        assert lower.repeated[-1] and not lower.is_repeated
        assert inputs["input_ids"].shape == (4,) and inputs["page_table"].shape[1] == 16
        padding = 4 - len(lengths)
        assert inputs["slot_mapping"].tolist() == [2] * len(lengths) + [-1] * padding
        assert inputs["kv_length"].tolist() == lengths + [1] * padding
        logits = session.upper(StepBatch(decode_step(lengths), *survivors(len(lengths))).upper(hidden), pools)
        assert logits.shape == (len(lengths), VOCAB) and plans["upper"].repeated[-1]
        seen.append([inputs[name].data_ptr() for name in ("input_ids", "page_table", "k_pool_0")])
    assert seen[0] == seen[1] == seen[2]
    assert len(lower.calls) == 5, "the first of a size runs once more, with neutral inputs of the policy"
    kept = lower.num_kept
    session.warm_up(pools, 64)
    assert lower.num_kept == kept + 1 and lower.repeated[-1]


def survivors(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(count).int(), torch.arange(count + 1).int()


def test_tables_of_positions(session, manifest):
    from kvforge.runtime.sessions.tensorrt import TensorRTSession

    with pytest.raises(EngineError, match="has no table of positions"):
        session.rope_tables  # noqa: B018
    tables = {"rope_cos": torch.ones(3, 4), "rope_sin": torch.zeros(3, 4)}
    made = TensorRTSession(manifest, session._plans, FakeStream(), CPU, tables)
    assert made.rope_tables == (tables["rope_cos"], tables["rope_sin"])


def test_operators_run_on_the_gpu_where_caches_are_changed_there(manifest, monkeypatch):
    """A process that serves has not built: what evicts is registered when the engine is loaded."""
    from kvforge.runtime.sessions.compatibility import register_transitions
    from plugins import PluginError, cuda_ops

    registered = []
    monkeypatch.setattr(cuda_ops, "register", lambda: registered.append(True))
    register_transitions(manifest)
    assert not registered
    evicts = dataclasses.replace(manifest, kv_policy="streaming", kv_policy_parameters=parse("streaming").parameters)
    register_transitions(evicts)
    assert registered == [True]

    def fail() -> None:
        raise PluginError("The operators need Triton to run on a GPU.")

    monkeypatch.setattr(cuda_ops, "register", fail)
    with pytest.raises(EngineError, match="need Triton"):
        register_transitions(evicts)


def test_pools_are_found_by_name_in_any_order(session):
    plan, pools = session._plans["lower"], session.allocate_pools(9)
    plan.inputs = (*plan.inputs[:6], *reversed(plan.inputs[6:]))
    plan.outputs = (*reversed(plan.outputs[1:]), plan.outputs[0])
    hidden = session.lower(STEP, pools)
    inputs, outputs = plan.calls[0]
    for owner, (k_pool, v_pool) in enumerate(pools):
        assert inputs[f"k_pool_{owner}"] is outputs[f"k_pool_{owner}_out"] is k_pool
        assert inputs[f"v_pool_{owner}"] is outputs[f"v_pool_{owner}_out"] is v_pool
    assert outputs["hidden"] is hidden


def test_verify(session):
    arguments = (torch.zeros(5, VOCAB), int32(3), int32(3), torch.zeros(0, VOCAB), torch.zeros(2), torch.zeros(5, 2))
    accepted, following = session.verify(VerifyStep(*arguments))
    assert accepted.shape == following.shape == (2,) and accepted.dtype == torch.int32


def test_no_graph_verify(session, manifest):
    from kvforge.runtime.sessions.tensorrt import TensorRTSession

    plans = {name: plan for name, plan in session._plans.items() if name != "verify"}
    session = TensorRTSession(manifest, plans, FakeStream(), CPU)
    with pytest.raises(EngineError, match="--max-draft-len"):
        session.verify(VerifyStep(*[torch.zeros(1)] * 6))


def test_pages_end_where_the_plan_does(session, manifest, monkeypatch):
    session.allocate_pools(PAGES)
    with pytest.raises(EngineError, match=f"at most {PAGES} pages, not {PAGES + 1}"):
        session.allocate_pools(PAGES + 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**40, 2**40))
    assert session.default_kv_cache_gib() * 2**30 == PAGES * manifest.page_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10_000, 2**40))
    assert 0 < session.default_kv_cache_gib() * 2**30 < 9000
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 2**40))
    assert session.default_kv_cache_gib() == 0
