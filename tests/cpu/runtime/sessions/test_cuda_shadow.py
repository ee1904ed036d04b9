"""The cuda session's staging and padding of ShadowKV's inputs, on the CPU with eager graphs inside."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from kvforge.common.errors import EngineError
from kvforge.compiler.options import BuildOptions
from kvforge.kv_policies.shadowkv.state import COUNTS
from kvforge.runtime.sessions import mapped_memory
from kvforge.runtime.sessions.cuda import CudaSession, activation_bytes
from kvforge.runtime.sessions.mapped_memory import mapped_host_memory
from model_defs import load_config
from tests.support.cuda.recorder import Recorder
from tests.support.rounding import assert_near, model_error
from tests.support.schedules.shadow_steps import TOKENS, ShadowSteps, mixed_steps
from tests.support.sessions.eager import EagerSession, random_session

HF = {
    "model_type": "llama_swiftkv",
    "swiftkv": True,
    "num_key_value_layers": 1,
    "key_value_group_size": 2,
    "vocab_size": 80,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def eager() -> EagerSession:
    policy = "shadowkv:rank=8,chunk_size=4,sparse_budget=16,num_outlier_chunks=2,num_local_tokens=8"
    return random_session(load_config(HF), BuildOptions(page_size=8, max_num_seqs=6, kv_policy=policy))


def padded(session: EagerSession, capture: Recorder | None) -> CudaSession:
    """A CUDA session whose graphs take flat inputs, as compiled ones do: step tensors, pools, shadow."""

    def flat(graph: torch.nn.Module, num_owners: int):
        def run(inputs: list[Tensor]) -> list[Tensor]:
            assert len(inputs) == 6 + 9 * num_owners + 4
            pools = [tuple(inputs[start : start + 9]) for start in range(6, 6 + 9 * num_owners, 9)]
            return [graph(*inputs[:6], pools, tuple(inputs[-4:]))]

        return run

    lower, upper = flat(session._lower, 2), flat(session._upper, 1)
    weights = dict(zip(("rope_cos", "rope_sin"), session.rope_tables, strict=True))
    return CudaSession(session.manifest, weights, {"lower": lower, "upper": upper}, torch.device("cpu"), capture)


@pytest.mark.parametrize("captures", [False, True])
@torch.inference_mode()
def test_logits_are_the_eager_sessions(captures: bool, eager: EagerSession) -> None:
    recorder = Recorder()
    session = padded(eager, recorder if captures else None)
    for one, other in zip(mixed_steps(session), mixed_steps(eager), strict=True):
        assert_near(one, other, model_error(eager.config, TOKENS))
    assert len(recorder.recordings) == (2 if captures else 0)
    assert all(recording.num_replays for recording in recorder.recordings)


@torch.inference_mode()
def test_tables_of_shadow_pages_have_widths_of_their_own(eager: EagerSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without factored sequences runs in a graph of the narrowest tables, padding is not factored."""
    monkeypatch.setattr("kvforge.runtime.sessions.cuda_decode.MIN_COLUMNS", 2)
    recorder, seen = Recorder(), []
    session = padded(eager, recorder)
    graph = session._decode._lower  # type: ignore[union-attr]

    def spy(inputs: list[Tensor]) -> list[Tensor]:
        seen.append([tensor.clone() for tensor in inputs[-4:]])
        return graph(inputs)

    session._decode._lower = spy  # type: ignore[union-attr]
    steps = ShadowSteps(session, 3, 80)
    tokens = list(range(60))
    steps.run([tokens, tokens[:20], tokens[:7]])
    steps.factor(0)
    assert not seen
    step = steps.lower_step([[5], [6], [7]])
    session.lower(step, steps.pools)
    slot, table, num_chunks, num_selected = seen[-1]
    assert slot.tolist() == [steps.slots[0], -1, -1, -1] and table.shape == (4, 16)
    assert table[0, :10].tolist() == steps.sequences[0].shadow_pages and not table[3].any()
    assert num_chunks.tolist() == [13, 0, 0, 0] and num_selected.tolist() == [4, 0, 0, 0]
    session.lower(step._replace(state=()), steps.pools)
    slot, table, num_chunks, _ = seen[-1]
    assert slot.tolist() == [-1] * 4 and table.shape == (4, 2) and not num_chunks.any()
    session.warm_up(steps.pools, 80, max_num_seqs=2)
    assert len(recorder.recordings) == 2 + 2 * 2


@torch.inference_mode()
def test_chunks_of_a_step_whose_graph_is_captured_are_counted_once(eager: EagerSession) -> None:
    recorder, counts = Recorder(), []
    for session in (padded(eager, recorder), eager):
        steps = ShadowSteps(session, 2, 80)
        steps.run([list(range(60)), list(range(7))])
        steps.factor(0)
        for pool in steps.pools:
            pool[COUNTS].zero_()
        for token in (5, 6, 7):
            steps.run([[token], [token]])
        counts.append([pool[COUNTS].tolist() for pool in steps.pools])
    assert len(recorder.recordings) == 2 and counts[0] == counts[1]
    # 3 steps of 4 chunks in each head, by one layer below the cut and by two above it.
    assert [pool[steps.slots[0]][0][0] for pool in counts[0]] == [12, 24]


def test_warm_up_writes_nothing(eager: EagerSession) -> None:
    session = padded(eager, Recorder())
    pools = session.allocate_pools(12, 9, 4)
    session.warm_up(pools, 30)
    assert all((pool[6] == -1).all() for pool in pools)
    assert not any(tensor.any() for pool in pools for tensor in (*pool[:6], *pool[7:]))
    assert [tensor.shape[0] for tensor in itertools.chain.from_iterable(pools)] == [12, 12, 9, 9, 9, 4, 4, 4, 9] * 2
    assert torch.equal(session.rope_tables[0], eager.rope_tables[0])


def test_memory_is_kept_free_for_the_scores_of_all_chunks(eager: EagerSession) -> None:
    """4 heads' fp32 scores of 2 chunks a page, of 6 sequences: 256 tokens more are 32 pages of 8."""
    longer = dataclasses.replace(eager.manifest, max_seq_len=eager.manifest.max_seq_len + 256)
    assert activation_bytes(longer) - activation_bytes(eager.manifest) == 6 * 4 * 4 * 2 * 32


def test_memory_for_a_gpu_is_locked_as_long_as_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the exact size, by a fake of CUDA's runtime; what torch makes of it on a GPU is not tested here."""
    calls: list[tuple[str, int, int]] = []

    class Runtime:
        result = 0

        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            calls.append(("register", address, num_bytes))
            return self.result if flags == 3 else 1

        def cudaHostUnregister(self, address: int) -> None:
            calls.append(("unregister", address, 0))

    held = []
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch, "as_tensor", lambda owner, device: held.append(owner) or owner.memory)
    memory = mapped_host_memory(5000, "cuda:0")
    assert memory.dtype == torch.uint8 and memory.shape == (5000,) and not memory.any()
    assert held[0].__cuda_array_interface__["data"] == (memory.data_ptr(), False)
    assert calls == [("register", memory.data_ptr(), 5000)]
    held.clear()
    assert calls[1:] == [("unregister", memory.data_ptr(), 0)]
    monkeypatch.setattr(Runtime, "result", 2)
    with pytest.raises(EngineError, match=r"cannot be locked for the GPU \(CUDA error 2\); give the cache fewer"):
        mapped_memory.mapped_host_memory(5000, "cuda:0")
    assert mapped_host_memory(0, "cpu").shape == (0,)
