"""Tokens that come of drafts are distributed as the target's: a Markov model, every text of three tokens counted.

Cells of the chi-square tests are texts; those expected less than ``LEAST`` times are one cell. Seeds are fixed and the
bound is at four standard deviations, which chance passes once in 30,000 tests.
"""

import math
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

import plugins
from kvforge.runtime import SamplingParams
from kvforge.runtime.requests.sequence import RequestMetrics, Sequence
from kvforge.runtime.sampling.state import RequestSampling
from kvforge.runtime.scheduling.schedule import Schedule
from kvforge.runtime.speculation.draft_runs import drawn_runs
from kvforge.runtime.speculation.drafter import Draft
from tests.support.schedules.fixed_drafting import speculative_engine
from tests.support.sessions.fake import FakeSession

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB, NUM_POSITIONS, NUM_DRAFTS, NUM_TEXTS, LEAST = 6, 3, 2, 100_000, 8
START = 4
SAMPLING = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"temperature": 1.3, "top_k": 3},
    "top-p": {"top_p": 0.75},
    "all filters": {"temperature": 1.4, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
}


def table(seed):
    """Logits [V, V] of the next token after each."""
    return 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


TARGET = table(0)


def filtered(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution of one token, by the definitions of vLLM's parameters."""
    probs = np.exp(np.float64(logits) / temperature)
    probs /= probs.sum()
    order = np.argsort(-probs)
    kept = [token for token in order if probs[token] >= min_p * probs[order[0]]][: top_k or None]
    mass, nucleus, total = 0.0, [], sum(probs[token] for token in kept)
    for token in kept:
        if mass < top_p * total:
            nucleus.append(token)
        mass += probs[token]
    result = np.zeros(VOCAB)
    result[nucleus] = probs[nucleus]
    return result / result.sum()


def expected_texts(logits, start, sampling):
    rows = [filtered(row.numpy(), **sampling) for row in logits]
    chances = {}
    for text in product(range(VOCAB), repeat=NUM_POSITIONS):
        chances[text] = math.prod(rows[a][b] for a, b in zip((start, *text), text, strict=False))
    return chances


def check_distribution(counts, chances):
    total = counts.total()
    assert not [text for text in counts if chances[text] == 0], "a text that cannot be"
    rare = [text for text, chance in chances.items() if chance * total < LEAST]
    cells = [(counts[text], chance * total) for text, chance in chances.items() if chance * total >= LEAST]
    cells.append((sum(counts[text] for text in rare), sum(chances[text] for text in rare) * total))
    cells = [(count, wanted) for count, wanted in cells if wanted > 0]
    freedom = len(cells) - 1
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in cells)
    # Wilson and Hilferty (1931): the cube root of chi-square over its degrees of freedom is close to normal.
    bound = freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound, (statistic, bound, freedom)


def one_hot_worst():
    """Drafts that are always the least probable token, said to be drawn from just that."""
    return torch.zeros(VOCAB, VOCAB).scatter_(1, TARGET.argmin(-1, keepdim=True), 1.0)


PROPOSALS = {
    "another model": table(1).softmax(-1),
    "nearly the target": (TARGET + 0.3 * table(2)).softmax(-1),
    "the least probable token": one_hot_worst(),
    "the target upside down": (-TARGET).softmax(-1),
    "never some tokens": torch.where(table(3) > 0, table(3).exp(), 0.0).clamp_(min=0).add_(torch.eye(VOCAB) * 1e-3),
}
PROPOSALS = {name: probs / probs.sum(-1, keepdim=True) for name, probs in PROPOSALS.items()}


def sequences_of(params, count):
    result = []
    for i in range(count):
        sequence = Sequence(str(i), 0, (0, i, 0), np.array([START]), params, 16, RequestMetrics(0, 0))
        sequence.sampling = RequestSampling(params, [START], VOCAB, frozenset(), []).state(0)
        sequence.sampling.random.seed(i)
        result.append(sequence)
    return result


def texts_of_rejection(sampling, proposal, num_texts, num_sequences=5000):
    """Count texts: in every round each sequence gets ``NUM_DRAFTS`` drafts, until it has all its tokens."""
    sequences = sequences_of(SamplingParams(**sampling), num_sequences)
    generator = torch.Generator().manual_seed(0)
    counts, num_accepted = Counter(), 0
    for _ in range(num_texts // num_sequences):
        texts = {sequence: [] for sequence in sequences}
        going = sequences
        while going:
            last = torch.tensor([(texts[sequence] or [START])[-1] for sequence in going])
            path, rows, probs = [last], [TARGET[last]], []
            for _ in range(NUM_DRAFTS):
                probs.append(proposal[path[-1]])
                path.append(torch.multinomial(probs[-1], 1, generator=generator).flatten())
                rows.append(TARGET[path[-1]])
            drafts, probs = torch.stack(path[1:], 1).tolist(), torch.stack(probs, 1)
            plan = Schedule(0, prefills=[(sequence, 1) for sequence in going])
            plan.drafts = {sequence: tuple(draft) for sequence, draft in zip(going, drafts, strict=True)}
            drawn_from = dict(zip(going, probs, strict=True))
            logits = torch.stack(rows, 1).reshape(-1, VOCAB)
            for sequence, run in drawn_runs(
                lambda step: plugins.speculative_verify(*step), plan, logits, drawn_from, going
            ).items():
                texts[sequence] += run
                num_accepted += len(run) - 1
            going = [sequence for sequence in going if len(texts[sequence]) < NUM_POSITIONS]
        counts.update(tuple(text[:NUM_POSITIONS]) for text in texts.values())
    return counts, num_accepted


@pytest.mark.parametrize(
    ("sampling", "proposal", "num_texts"),
    [
        ("plain", "another model", 10_000),
        ("temperature", "the target upside down", 10_000),
        ("top-k", "nearly the target", 10_000),
        ("top-p", "never some tokens", 10_000),
        ("all filters", "another model", 40_000),
        ("all filters", "the least probable token", 10_000),
    ],
)
def test_rejection_recovers_the_targets_distribution(sampling, proposal, num_texts, request):
    plugins.load_library()
    if request.config.getoption("--full"):
        num_texts = NUM_TEXTS
    counts, num_accepted = texts_of_rejection(SAMPLING[sampling], PROPOSALS[proposal], num_texts)
    assert counts.total() == num_texts
    assert num_accepted > 0.1 * num_texts or proposal == "the least probable token"
    check_distribution(counts, expected_texts(TARGET, START, SAMPLING[sampling]))


def test_the_check_notices_another_distribution():
    plugins.load_library()
    counts, _ = texts_of_rejection({"temperature": 1.2}, PROPOSALS["nearly the target"], 20_000)
    with pytest.raises(AssertionError):
        check_distribution(counts, expected_texts(TARGET, START, {}))


class MarkovSession(FakeSession):
    """The next token depends on the last one alone."""

    def __init__(self, **changes):
        limits = dict(vocab_size=VOCAB, max_num_seqs=250, max_num_tokens=1500, max_draft_len=NUM_DRAFTS)
        super().__init__(**{**limits, "eos_token_ids": (), **changes})

    def lower(self, step, pools):
        return TARGET[step.input_ids.long()]

    def upper(self, step, pools):
        return step.hidden[step.survivor_index.long()]

    def verify(self, step):
        return plugins.speculative_verify(*step)


class MarkovDrafter:
    """Draws from a table, or, with ``drawn`` off, says the most probable token of one row and the least of another."""

    def __init__(self, proposal, drawn):
        self.proposal, self.drawn = proposal, drawn
        self.generator = torch.Generator().manual_seed(0)

    def draft(self, sequences, counts):
        drafts = []
        for sequence, count in zip(sequences, counts, strict=True):
            tokens, last = [], int(sequence.tokens[sequence.length - 1])
            probs = []
            for _ in range(count):
                row = self.proposal[last]
                probs.append(row)
                last = int(torch.multinomial(row, 1, generator=self.generator) if self.drawn else row.argmax())
                tokens.append(last)
            drafts.append(Draft(tuple(tokens), torch.stack(probs) if self.drawn else None))
        return drafts

    def forget(self, sequence):
        pass


@pytest.mark.parametrize(
    ("sampling", "proposal", "drawn"),
    [
        ("top-p", "another model", True),
        ("all filters", "nearly the target", False),
        ("temperature", "the least probable token", False),
    ],
)
def test_an_engines_texts_have_the_targets_distribution(sampling, proposal, drawn, request):
    """Drafts drawn, and not drawn: those are verified with the sequence's own numbers. Four tokens are asked for, so
    that all three that are counted may come of drafts."""
    plugins.load_library()
    num_texts = NUM_TEXTS if request.config.getoption("--full") else 3000
    engine = speculative_engine(MarkovSession(), MarkovDrafter(PROPOSALS[proposal], drawn), NUM_DRAFTS, num_pages=600)
    params = SamplingParams(**SAMPLING[sampling], max_tokens=NUM_POSITIONS + 1, n=250)
    counts = Counter()
    for i in range(num_texts // params.n):
        engine.add_request("a", [START], params)
        for sequence in engine.requests["a"].sequences:
            sequence.sampling.random.seed(1000 * i + sequence.index)
        texts = {}
        while engine.has_unfinished():
            for output in engine.step():
                texts.setdefault(output.index, []).extend(output.new_token_ids)
        counts.update(tuple(text[1:]) for text in texts.values())
    first = filtered(TARGET[START].numpy(), **SAMPLING[sampling])
    mixed = Counter()
    for token in range(VOCAB):
        for text, chance in expected_texts(TARGET, token, SAMPLING[sampling]).items():
            mixed[text] += first[token] * chance
    assert engine.stats()["num_accepted_draft_tokens"] > (
        0 if proposal == "the least probable token" else num_texts // 2
    )
    check_distribution(counts, mixed)
