"""SpeculativeVerify on CPU against its reference, the distribution it draws from, and what it refuses."""

import pytest
import torch

import plugins
from plugins.speculative_verify.cases import random_case as speculative_verify_case

REFERENCE = plugins.OPERATORS["speculative_verify"].reference


NEAR = 1e-4
"""Shares that fp32 cannot tell apart: exponentials round by 8 epsilons of their exponents, below 20 here, and sums of
up to 50,000 of them in blocks and lanes by as much again; in any order they would by sqrt(50,000) epsilons."""


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def may_be_drawn(args: tuple, s: int, accepted: int, token: int) -> bool:
    """Whether the sequence, having accepted so many, draws this token with its number moved by at most NEAR."""
    logits, draft_ids, draft_start, draft_probs, temperature, uniform = args
    begin, end = draft_start[s : s + 2].tolist()
    weight = torch.softmax(logits[begin + s + accepted].double() / temperature[s], dim=-1)
    if accepted < end - begin:
        q = torch.zeros_like(weight)
        if len(draft_probs):
            q = draft_probs[begin + accepted].double()
        else:
            q[draft_ids[begin + accepted]] = 1
        residual = (weight - q).clamp(min=0)
        weight = residual if residual.any() else weight
    cumulative = weight.cumsum(0) / weight.sum()
    below = float(cumulative[token - 1]) if token else 0.0
    return below - NEAR <= float(uniform[begin + s + accepted, 1]) < float(cumulative[token]) + NEAR


def large_vocabulary(temperature: float) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    vocab, gammas = 150_001, (0, 2, 1)
    logits = torch.randn(sum(gammas) + len(gammas), vocab) * 3
    starts = torch.tensor([0, *gammas]).cumsum(0).int()
    draft_ids = torch.stack([logits[row].argmax() for row in (1, 2, 4)]).int()
    probs = torch.softmax(logits[[1, 2, 4]] / 0.8, dim=-1)
    return logits, draft_ids, starts, probs, torch.full((3,), temperature), torch.rand(len(logits), 2)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_large_vocabulary(temperature, isas, monkeypatch):
    args = large_vocabulary(temperature)
    accepted, next_token = REFERENCE(*args)
    for isa in isas:
        monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
        got = plugins.speculative_verify(*args)
        assert torch.equal(got[0], accepted), isa
        for s in (got[1] != next_token).nonzero().flatten().tolist():
            assert temperature > 0 and may_be_drawn(args, s, int(accepted[s]), int(got[1][s])), (isa, s)


@pytest.mark.parametrize("one_hot", [False, True])
def test_drafts_do_not_change_the_distribution_of_the_first_token(one_hot):
    """Leviathan et al. 2023, appendix A.1: the first token of a step is distributed as p, whatever q."""
    torch.manual_seed(3)
    count, vocab = 60_000, 6
    p = torch.softmax(torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0, -3.0]) / 0.7, dim=-1)
    q = torch.softmax(torch.tensor([2.0, 0.0, -1.0, 1.5, 0.5, 1.0]), dim=-1)
    logits = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0, -3.0]).repeat(2 * count, 1)
    drafts = torch.full((count,), 3) if one_hot else torch.multinomial(q, count, replacement=True)
    probs = torch.empty(0, vocab) if one_hot else q.repeat(count, 1)
    starts, temperature = torch.arange(count + 1).int(), torch.full((count,), 0.7)
    accepted, token = plugins.speculative_verify(
        logits, drafts.int(), starts, probs, temperature, torch.rand(2 * count, 2)
    )
    first = torch.where(accepted == 1, drafts, token)
    seen = torch.bincount(first, minlength=vocab)
    chi_square = float(((seen - count * p) ** 2 / (count * p)).sum())
    assert chi_square < 20.5  # the 0.1% quantile of 5 degrees of freedom
    # The token after an accepted draft is a draw from p too.
    bonus = torch.bincount(token[accepted == 1], minlength=vocab)
    assert float(((bonus - bonus.sum() * p) ** 2 / (bonus.sum() * p)).sum()) < 20.5


def test_a_sequence_does_not_depend_on_its_neighbours_or_threads():
    threads = torch.get_num_threads()
    try:
        for seed in range(60):
            logits, ids, starts, probs, temperature, uniform = args = speculative_verify_case(seed)
            torch.set_num_threads(2)
            together = plugins.speculative_verify(*args)
            torch.set_num_threads(1)
            for s, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
                rows, q = slice(begin + s, end + s + 1), probs[begin:end] if len(probs) else probs
                start = ints(0, end - begin)
                alone = plugins.speculative_verify(
                    logits[rows], ids[begin:end], start, q, temperature[s : s + 1], uniform[rows]
                )
                assert [int(x) for x in alone] == [int(x[s]) for x in together], (seed, s)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_give_some_token(temperature, isas, monkeypatch):
    for value in (float("nan"), float("inf"), -float("inf")):
        for logits in (torch.full((3, 2000), value), torch.randn(3, 2000).index_fill(1, torch.tensor(1500), value)):
            args = (logits, ints(5), ints(0, 1, 1), torch.empty(0, 2000), torch.full((2,), temperature))
            for isa in isas:
                monkeypatch.setenv("KVFORGE_CPU_ISA", isa)
                accepted, token = plugins.speculative_verify(*args, torch.full((3, 2), 0.999))
                assert 0 <= int(accepted[0]) <= 1 and int(accepted[1]) == 0
                assert ((token >= 0) & (token < 2000)).all()
                if temperature == 0:
                    assert int(token[1]) == int(logits[2].argmax())


def arguments() -> dict[str, torch.Tensor]:
    return {
        "logits": torch.randn(5, 9),
        "draft_ids": ints(0, 8, 3),
        "draft_start": ints(0, 2, 3),
        "draft_probs": torch.softmax(torch.randn(3, 9), dim=-1),
        "temperature": torch.tensor([0.0, 1.0]),
        "uniform": torch.rand(5, 2),
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logits", torch.randn(4, 9)),
        ("logits", torch.randn(5, 0)),
        ("logits", torch.randn(5, 9, 1)),
        ("logits", torch.randn(5, 9).bfloat16()),
        ("draft_ids", ints(0, 9, 3)),
        ("draft_ids", ints(0, -1, 3)),
        ("draft_ids", ints(0, 2**31 - 1, 3)),
        ("draft_ids", ints([0, 1, 3])),
        ("draft_ids", torch.tensor([0, 1, 3])),
        ("draft_start", ints(0, 2, 4)),
        ("draft_start", ints(0, 4, 3)),
        ("draft_start", ints(-1, 2, 3)),
        ("draft_start", ints(0, -(2**31), 3)),
        ("draft_start", ints()),
        ("draft_start", torch.tensor([0, 2, 3])),
        ("draft_probs", torch.rand(2, 9)),
        ("draft_probs", torch.rand(3, 8)),
        ("draft_probs", torch.rand(0, 8)),
        ("draft_probs", torch.rand(27)),
        ("draft_probs", torch.rand(3, 9).double()),
        ("temperature", torch.tensor([1.0])),
        ("temperature", torch.tensor([1.0, -0.5])),
        ("temperature", torch.tensor([1.0, float("nan")])),
        ("temperature", torch.tensor([1.0, float("inf")])),
        ("temperature", torch.tensor([1, 0])),
        ("uniform", torch.rand(5)),
        ("uniform", torch.rand(4, 2)),
        ("uniform", torch.ones(5, 2)),
        ("uniform", torch.full((5, 2), float("nan"))),
        ("uniform", torch.rand(5, 2).double()),
    ],
)
def test_refuses_wrong_arguments_by_name(name, value):
    assert plugins.speculative_verify(**arguments())[0].shape == (2,)
    with pytest.raises(RuntimeError, match=rf"speculative_verify: {name} "):
        plugins.speculative_verify(**(arguments() | {name: value}))


def test_opcheck():
    op = torch.ops.kvforge.speculative_verify.default
    for seed in range(40):
        case = speculative_verify_case(seed)
        if all(x.numel() for x in case):  # opcheck cannot clone an empty argument
            torch.library.opcheck(op, case)
            return
    raise AssertionError("no case without an empty argument")
