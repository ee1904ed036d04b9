"""ExpertLinear on CPU: bits that must not depend on the rest of a batch, experts with no token and with all, and what
it refuses."""

import pytest
import torch

import plugins
from plugins.agreement import values_differ
from plugins.expert_linear import pack_experts
from plugins.expert_linear.cases import random_case
from plugins.packed_linear import pack
from plugins.packed_linear.packing import INT4

DTYPES = (torch.bfloat16, torch.int8, *INT4)
EXPERTS, ACTIVE, DEPTH, OUTPUTS = 5, 2, 140, 70


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def choices(tokens: int, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(EXPERTS, generator=gen)[:ACTIVE] for _ in range(tokens)]).int()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_wide", [False, True], ids=["a row a token", "a row a token and expert"])
def test_a_token_has_the_bits_of_its_experts_alone(dtype, is_wide, isas, monkeypatch):
    """Those of PackedLinear with the expert's weight, whichever tokens come along: none to an expert, all to one, more
    than a block of rows; on any number of threads."""
    tokens, gated = 140, not is_wide
    weight = normal(EXPERTS, OUTPUTS * (1 + gated), DEPTH, seed=1) / 18
    packed, scales = pack_experts(weight, dtype, gated)
    x = normal(tokens, ACTIVE, DEPTH, seed=2) if is_wide else normal(tokens, DEPTH, seed=2)
    ids = choices(tokens)
    threads = torch.get_num_threads()
    for isa in isas:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        want = torch.empty(tokens, ACTIVE, OUTPUTS)
        for expert in range(EXPERTS):
            own, own_scales = pack(weight[expert], dtype, gated)
            rows = x if is_wide else x[:, None].expand(-1, ACTIVE, -1)
            chosen = ids == expert
            want[chosen] = plugins.packed_linear(
                rows[chosen].contiguous(), own, OUTPUTS, scales=own_scales, gated=gated, float32_out=True
            )

        def run(part: slice, ids=ids) -> torch.Tensor:
            options = {"scales": scales, "gated": gated, "float32_out": True}
            return plugins.expert_linear(x[part], packed, ids[part], OUTPUTS, **options)

        try:
            for count in (1, 3):
                torch.set_num_threads(count)
                assert torch.equal(run(slice(tokens)), want), (isa, count)
                for begin, size in ((0, 1), (3, 2), (7, 17), (30, 64), (139, 1)):
                    part = slice(begin, begin + size)
                    assert torch.equal(run(part), want[part]), (isa, count, size)
            to_one = torch.full_like(ids, 3)
            alone = torch.cat([run(slice(t, t + 1), to_one) for t in range(0, tokens, 20)])
            assert torch.equal(run(slice(tokens), to_one)[::20], alone), isa
        finally:
            torch.set_num_threads(threads)


def test_no_token_and_weights_that_are_not_packed():
    weight, ids = torch.randn(EXPERTS, 2 * OUTPUTS, 9), choices(4)
    x = torch.randn(4, 9)
    got = plugins.expert_linear(x, weight, ids, OUTPUTS, gated=True)
    gate, up = torch.einsum("tkni,ti->tkn", weight[ids.long()], x).chunk(2, -1)
    assert values_differ(got, torch.nn.functional.silu(gate) * up, terms=9) is None
    assert plugins.expert_linear(x[:0], weight, ids[:0], OUTPUTS, gated=True).shape == (0, ACTIVE, OUTPUTS)
    packed, _ = pack_experts(weight.bfloat16(), torch.bfloat16, gated=True)
    assert plugins.expert_linear(x[:0].bfloat16(), packed, ids[:0], OUTPUTS, gated=True).shape == (0, ACTIVE, OUTPUTS)


def arguments() -> dict:
    packed, scales = pack_experts(normal(EXPERTS, OUTPUTS, 10), torch.int8)
    return {
        "x": normal(3, 10),
        "weight": packed,
        "expert_ids": choices(3),
        "out_features": OUTPUTS,
        "scales": scales,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x", torch.randn(3, 10)),
        ("x", normal(2, 10)),
        ("x", normal(3, 3, 10)),
        ("x", normal(3, 2, 10, 1)),
        ("x", normal(10, 3).T),
        ("x", normal(3, 0)),
        ("x", normal(3, 10).half()),
        ("weight", normal(70, 10)),
        ("weight", normal(EXPERTS, 71, 10)),
        ("weight", torch.randn(EXPERTS, OUTPUTS, 10)),
        ("weight", arguments()["weight"][..., :2]),
        ("weight", arguments()["weight"][:, :1]),
        ("expert_ids", choices(3).long()),
        ("expert_ids", choices(3).flatten()),
        ("expert_ids", choices(3)[:, :0]),
        ("expert_ids", choices(3) + EXPERTS),
        ("expert_ids", choices(3) - EXPERTS),
        ("scales", None),
        ("scales", arguments()["scales"][:2]),
        ("out_features", 0),
    ],
)
def test_refuses_wrong_arguments_by_name(name, value):
    assert plugins.expert_linear(**arguments()).shape == (3, ACTIVE, OUTPUTS)
    with pytest.raises(RuntimeError, match=rf"expert_linear: {name} "):
        plugins.expert_linear(**(arguments() | {name: value}))


def test_refuses_scales_without_quantized_weights():
    for weight in (normal(EXPERTS, OUTPUTS, 10), pack_experts(normal(EXPERTS, OUTPUTS, 10), torch.bfloat16)[0]):
        with pytest.raises(
            RuntimeError, match="expert_linear: scales must be given with int8 and int4 weights, and only"
        ):
            plugins.expert_linear(**(arguments() | {"weight": weight}))


def test_opcheck():
    op = torch.ops.kvforge.expert_linear.default
    for args in [random_case(seed, small=True) for seed in range(6)]:
        torch.library.opcheck(op, args)
