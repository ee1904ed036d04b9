"""The TensorRT session around plans that record what they are given, on the CPU."""

import pytest
import torch

from kvforge.common.errors import EngineError
from kvforge.manifest import Manifest
from kvforge.runtime.sessions.inputs import LowerStep, VerifyStep
from kvforge.runtime.step.batch import StepBatch
from tests.support.cuda.fake_stream import FakeStream, fake_current_stream

HIDDEN, VOCAB, PAGES = 6, 11, 40


class RecordingPlan:
    """Takes the given inputs and pools; fills its first output with ones."""

    workspace_bytes = 128

    def __init__(self, inputs, outputs, dtypes):
        self.inputs, self.outputs, self.dtypes, self.calls = inputs, outputs, dtypes, []

    def make_contexts(self, workspace, stream):
        assert workspace.numel() >= self.workspace_bytes

    def largest(self, name, dim):
        assert name.startswith("k_") or name.startswith("v_")
        return PAGES

    def run(self, inputs, outputs, stream, nothing):
        self.calls.append((dict(inputs), dict(outputs)))
        next(iter(outputs.values())).fill_(1)


def make_plan(graph: str, owners: tuple[int, ...], results: dict[str, torch.dtype], step_types=None) -> RecordingPlan:
    from kvforge.runtime.sessions.tensorrt import STEP_INPUTS

    pools = [f"{kind}_pool_{owner}" for owner in owners for kind in "kv"]
    written = [f"{name}_out" for name in pools] if graph == "lower" else []
    dtypes = dict.fromkeys(STEP_INPUTS[graph], torch.int32) | (step_types or {}) | results
    dtypes |= dict.fromkeys((*pools, *written), torch.bfloat16)
    return RecordingPlan((*STEP_INPUTS[graph], *pools), (*results, *written), dtypes)


@pytest.fixture
def manifest() -> Manifest:
    values = {field: 0 for field in Manifest.__dataclass_fields__} | {"kv_policy": "full", "kv_policy_parameters": {}}
    values |= {"dtype": "bfloat16", "kv_dtype": "bfloat16", "kv_scales": (), "cut": 2, "owner_of_layer": (0, 1, 2, 2)}
    values |= {"hidden_size": HIDDEN, "vocab_size": VOCAB, "page_size": 4, "num_kv_heads": 2, "head_dim": 8}
    values |= {"latent_rank": None, "auxiliary_model": {}}
    return Manifest(**values | {"max_num_tokens": 64, "max_num_seqs": 4, "max_draft_len": 2})


@pytest.fixture
def session(trt, manifest, monkeypatch):
    from kvforge.runtime.sessions import tensorrt as tensorrt_session

    monkeypatch.setattr(tensorrt_session, "_DEVICE", torch.device("cpu"))
    f32, bf16, i32 = torch.float32, torch.bfloat16, torch.int32
    floats = dict.fromkeys(("logits", "draft_probs", "temperature", "uniform"), f32)
    plans = {
        "lower": make_plan("lower", (0, 1, 2), {"hidden": bf16}),
        "upper": make_plan("upper", (2,), {"logits": f32}, {"hidden": bf16}),
        "verify": make_plan("verify", (), {"accepted": i32, "next_token": i32}, floats),
    }
    fake_current_stream(monkeypatch)
    return tensorrt_session.TensorRTSession(manifest, plans, FakeStream())


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
    own, callers = session._stream, torch.cuda.current_stream()
    assert own.waited == [callers] * 2 and callers.waited == [own] * 2, (
        "each graph comes after what the caller gathered"
    )


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


def test_no_graph_verify(session):
    del session._plans["verify"]
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
