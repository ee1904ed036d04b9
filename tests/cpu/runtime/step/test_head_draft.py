"""Drafts by a head: those of the published head, and the tokens of plain decoding whatever they are."""

import dataclasses
import itertools
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvforge.compiler.options import BuildOptions
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.draft_length import DraftLength
from kvforge.runtime.step import head_draft, runner
from kvforge.runtime.step.head_draft import HeadDraft
from model_defs import families
from model_defs.mtp import BY_ITSELF
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.draft_heads import (
    ReferenceHead,
    ReferenceModule,
    add_mtp,
    draft_only,
    make_head,
    noted_drafts,
    streams,
)
from tests.support.schedules.engine_schedules import check_tokens, random_plan, run_plan
from tests.support.sessions.eager import EagerSession, eager_session

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {"dtype": "float32", "page_size": 4, "max_num_tokens": 64, "max_num_seqs": 8, "max_seq_len": 128}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(autouse=True)
def as_long_as_possible(monkeypatch):
    """Draft lengths that do not depend on times."""
    monkeypatch.setattr(DraftLength, "is_due", lambda self, num_sequences: True)
    monkeypatch.setattr(DraftLength, "choose", lambda self, num_sequences, available: dict(available))
    monkeypatch.setattr(DraftLength, "pays_for_prompts", True)


def session_of(target: Path, head: Path | str | None) -> EagerSession:
    more = {} if head is None else {"draft_head": str(head)}
    return eager_session(target, BuildOptions(**OPTIONS, max_draft_len=7, **more))


def decode(session, prompts, count, params=GREEDY, **options):
    """Tokens of each prompt, and the drafts of each step with the tokens that they follow."""
    speculative = None if count == 0 else SpeculativeConfig(session.manifest.draft_head.kind, count)
    engine = LLMEngine(session=session, num_pages=100, speculative=speculative, **options)
    seen = noted_drafts(engine) if count else []
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    texts = {}
    while engine.has_unfinished():
        for output in engine.step():
            texts.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
        engine.check_invariants()
    return texts, seen, engine


PROMPTS = [[5, 6, 7], [9] * 11, [5, 6, 7, 8, 30, 40, 50]]


IDS = "eagle_aux_hidden_state_layer_ids"
HEAD = {IDS: [1, 2, 3]}


@pytest.mark.parametrize(
    ("cut", "layers", "fields"),
    [
        (None, (1, 2, 3), {IDS: [1, 2, 3]}),
        (None, (2, 2, 1), {"draft_vocab": 320, "norm_before_residual": True}),
        (None, (0, 3, 2), {"eagle_config": {IDS: [-1, 2, 1]}, "hidden_size": 48, "table": True}),
        (3, (1, 3, 2), {IDS: [1, 3, 2]}),
        (2, (1, 2, 3), {IDS: [1, 2, 3], "table": True}),
        (1, (2, 2, 3), {IDS: [2, 2, 3], "hidden_size": 32, "table": True}),
    ],
)
def test_drafts_are_the_published_head_s(tmp_path, cut, layers, fields):
    """A head that reads above the cut has entries of survivors alone, of which a prompt's last token is the first."""
    target = make_checkpoint(tmp_path / "target", cut=cut)
    head, prompts = make_head(tmp_path / "head", target, **fields), {tuple(prompt) for prompt in PROMPTS}
    plain, _, _ = decode(session_of(target, None), PROMPTS, 0)
    texts, seen, _ = decode(session_of(target, head), PROMPTS, 4, max_num_tokens=8)
    assert texts == plain
    reference = ReferenceHead(head, target)
    assert len(seen) > 20
    for tokens, drafts in seen:
        is_above = cut is not None and max(layers) > cut
        first = max(len(p) for p in prompts if tuple(tokens[: len(p)]) == p) - 1 if is_above else 0
        assert drafts == reference.draft(tokens, streams(target, tokens[:-1], layers), len(drafts), first)


@pytest.mark.parametrize(("cut", "fields"), [(None, {}), (3, {"norm_before_residual": True, "table": True})])
def test_as_many_drafts_are_right_as_of_the_published_head_s(tmp_path, cut, fields):
    """A random head that drafts the text's commonest tokens alone, and decoding with its plain-torch form."""
    target, rng = make_checkpoint(tmp_path / "target", cut=cut), random.Random(0)
    prompts = [[rng.randrange(3, 320) for _ in range(count)] for count in (2, 9, 23)]
    texts = list(decode(session_of(target, None), prompts, 0)[0].values())
    commonest = [token for token, _ in Counter(itertools.chain(*texts)).most_common(3)]
    head = draft_only(make_head(tmp_path / "head", target, draft_vocab=3, **HEAD, **fields), commonest)
    drafted = right = 0
    reference = ReferenceHead(head, target)
    for prompt, text in zip(prompts, texts, strict=True):
        tokens, length = [*prompt, *text], len(prompt) + 1
        while (room := min(4, len(tokens) - length - 1)) > 0:
            drafts = reference.draft(tokens[:length], streams(target, tokens[: length - 1], (1, 2, 3)), room)
            accepted = len(list(itertools.takewhile(bool, map(int.__eq__, drafts, tokens[length:]))))
            drafted, right, length = drafted + room, right + accepted, length + accepted + 1
    stats = decode(session_of(target, head), prompts, 4)[2].stats()
    assert (stats["num_draft_tokens"], stats["num_accepted_draft_tokens"]) == (drafted, right)
    assert right > 5


SHARED = "embed_tokens|[.]head|lm_head"


@pytest.mark.parametrize(
    ("family", "cut", "leave_out", "fields"),
    [
        ("deepseek_v3", None, "", {"q_lora_rank": 24}),
        ("deepseek_v3", 2, SHARED, {}),
        ("glm4_moe", None, SHARED, {}),
        ("glm4_moe", 2, "", {"first_k_dense_replace": 4}),
        ("qwen3_moe", None, SHARED, {}),
        ("qwen3_moe", 3, SHARED, {"tie_word_embeddings": True}),
        ("qwen3_5_text", None, SHARED, {}),
        ("qwen3_5_text", 2, "", {"tie_word_embeddings": True}),
    ],
)
def test_drafts_are_the_module_s(tmp_path, monkeypatch, family, cut, leave_out, fields):
    """With latent attention and without, with experts and without, its embedding and head its own or the model's, in
    one more layer or beside the layers, also of models whose other layers keep states."""
    if families()[family].mtp is None:
        monkeypatch.setitem(families(), family, dataclasses.replace(families()[family], mtp=BY_ITSELF))
    target = add_mtp(make_checkpoint(tmp_path / "target", family, cut=cut, **fields), leave_out=leave_out)
    session, reference = session_of(target, "mtp"), ReferenceModule(target)
    head, is_tied = session.manifest.draft_head, "tie_word_embeddings" in fields
    assert (head.own_embedding, head.own_lm_head) == (not leave_out, not leave_out or is_tied)
    assert (head.model.latent is None, head.model.experts is None) == (
        family != "deepseek_v3",
        "first_k_dense_replace" in fields or family == "qwen3_5_text",
    )
    plain, _, _ = decode(session_of(target, None), PROMPTS, 0)
    texts, seen, _ = decode(session, PROMPTS, 4, max_num_tokens=8)
    assert texts == plain and len(seen) > 20
    prompts = {tuple(prompt) for prompt in PROMPTS}
    for tokens, drafts in seen:
        first = max(len(p) for p in prompts if tuple(tokens[: len(p)]) == p) - 1 if cut else 0
        assert drafts == reference.draft(tokens, len(drafts), first)


@pytest.mark.parametrize("cut", [None, 3, 2])
def test_while_nothing_is_drafted_there_are_no_entries(tmp_path, monkeypatch, cut):
    """Of the tokens of six steps in nine. Others wait, and are written three at a time or with the next draft; what
    comes behind a gap follows in the pages."""
    calls, written = itertools.count(), {}
    monkeypatch.setattr(DraftLength, "is_due", lambda self, num_sequences: next(calls) % 9 > 5)
    monkeypatch.setattr(DraftLength, "num_rests", lambda self, num_sequences: 0)
    monkeypatch.setattr(DraftLength, "choose", lambda self, n, free: dict(free) if next(calls) % 2 else {})
    monkeypatch.setattr(head_draft, "MAX_WAITING", 1)
    take = HeadDraft._take

    def noted(self, sequence, end, is_wanted):
        found = take(self, sequence, end, is_wanted)
        for entries in found:
            written.setdefault(int(sequence.tokens[0]), []).extend(entries.positions.tolist())
        return found

    monkeypatch.setattr(HeadDraft, "_take", noted)
    target = make_checkpoint(tmp_path / "target", cut=cut)
    head = make_head(tmp_path / "head", target, **HEAD)
    texts, seen, _ = decode(session_of(target, head), PROMPTS[1:], 4)
    assert texts == decode(session_of(target, None), PROMPTS[1:], 0)[0]
    reference, gaps = ReferenceHead(head, target), 0
    assert len(seen) >= 4
    for tokens, drafts in seen:
        kept = [position for position in written[tokens[0]] if position < len(tokens) - 1]
        gaps += kept[-1] - kept[0] >= len(kept)
        assert kept == sorted(set(kept)) and kept[0] == (len(PROMPTS[1 + (tokens[0] == 5)]) - 1 if cut == 2 else 0)
        assert drafts == reference.draft(tokens, streams(target, tokens[:-1], (1, 2, 3)), len(drafts), kept=kept)
    assert gaps > 2


def test_prompts_that_are_not_paid_for_have_no_entries(tmp_path, monkeypatch):
    """Those of what is generated are packed; who goes on behind such a prompt does not take them for the prompt's."""
    paid = False
    monkeypatch.setattr(DraftLength, "pays_for_prompts", property(lambda self: paid))
    target = make_checkpoint(tmp_path / "target", cut=3)
    head = make_head(tmp_path / "head", target, **HEAD)
    session, reference = session_of(target, head), ReferenceHead(head, target)
    engine = LLMEngine(session=session, num_pages=100, speculative=SpeculativeConfig("eagle3", 4), max_num_tokens=8)
    seen, written, run = noted_drafts(engine), [], engine.runner.head_draft._run
    engine.runner.head_draft._run = lambda passes, slots: written.extend(passes) or run(passes, slots)

    def entries_of(prompt):
        """Where the entries of a prompt's drafts begin; the drafts are compared."""
        seen.clear()
        written.clear()
        engine.add_request(str(engine.num_iterations), prompt, GREEDY)
        while engine.has_unfinished():
            engine.step()
        first = min(int(entries.positions[0]) for entries in written)
        assert len(seen) > 4
        for tokens, drafts in seen:
            assert drafts == reference.draft(tokens, streams(target, tokens[:-1], (1, 2, 3)), len(drafts), first)
        return first

    shared, other = [9, 8, 7, 6] * 4, [20, 21, 22, 23] * 4
    assert entries_of([*shared, 5, 6, 7]) == 19
    paid = True
    assert entries_of([*shared, 11, 12]) == 18
    assert engine.stats()["num_reused_tokens"] == 16
    assert entries_of([*other, 5]) == 0


def test_a_model_with_another_unit_of_the_stream(tmp_path):
    """Granite's graphs have the residual stream divided by a factor."""
    target = make_checkpoint(tmp_path / "target", "granite")
    head = make_head(tmp_path / "head", target, **HEAD)
    reference = ReferenceHead(head, target)
    _, seen, _ = decode(session_of(target, head), PROMPTS, 4)
    for tokens, drafts in seen:
        assert drafts == reference.draft(tokens, streams(target, tokens[:-1], (1, 2, 3)), len(drafts))


def test_a_module_of_a_model_in_int8_reads_states_that_are_turned_back(tmp_path):
    """So they are those of the model unrounded, but for the rounding."""
    fields = {"first_k_dense_replace": 4, "dtype": torch.bfloat16}
    target = add_mtp(make_checkpoint(tmp_path / "target", "glm4_moe", **fields), leave_out=SHARED)
    options = dict(OPTIONS, dtype="bfloat16", weight_dtype="int8", max_draft_len=4, draft_head="mtp")
    session, noted = eager_session(target, BuildOptions(**options)), []
    draft = session.draft
    session.draft = lambda step, pool: noted.append((step.positions[0], step.hidden[0])) or draft(step, pool)
    texts, _, _ = decode(session, PROMPTS[:1], 1)
    wanted = ReferenceModule(target).states(PROMPTS[0] + texts["0", 0])
    assert len(noted) > 10 and session.manifest.draft_head.own_embedding
    for position, state in noted:
        assert torch.cosine_similarity(state.float(), wanted[position].float(), dim=0) > 0.98


@pytest.mark.parametrize("cut", [3, 2])
def test_a_model_in_int8_has_its_stream_in_another_basis(tmp_path, cut):
    """The head's states are those of the model unrounded, but for the rounding; so are its embeddings."""
    target = make_checkpoint(tmp_path / "target", cut=cut, dtype=torch.bfloat16)
    head = make_head(tmp_path / "head", target, **HEAD)
    options = dict(OPTIONS, dtype="bfloat16", weight_dtype="int8", max_draft_len=4, draft_head=str(head))
    session = eager_session(target, BuildOptions(**options))
    noted, draft = [], session.draft
    session.draft = lambda step, pool: noted.append((step.positions[0], step.hidden[0])) or draft(step, pool)
    texts, _, _ = decode(session, PROMPTS[:1], 1)
    tokens = PROMPTS[0] + texts["0", 0]
    wanted = streams(target, tokens, (1, 2, 3)) @ ReferenceHead(head, target).weights["fc.weight"].T
    assert len(noted) > 10
    for position, state in noted:
        assert torch.cosine_similarity(state.float(), wanted[position], dim=0) > 0.98
    table = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(session._weights["draft.embed.weight"], table)


# Weights of seed 0 have a draw at temperature 1.7 between two logits that are 1e-6 apart, which float32 decides.
MODULES = {
    "latent module": ("deepseek_v3", None),
    "latent module, cut": ("deepseek_v3", 2),
    "module": ("glm4_moe", 3),
    "gated module, states": ("qwen3_5_text", None),
}


STATES = {"states": "qwen3_5_text", "states of Mamba-2": "bamba"}


@pytest.fixture(scope="module", params=["no cut", "below the cut", "above the cut", *STATES, *MODULES])
def session(request, tmp_path_factory) -> EagerSession:
    """Of a model whose head reads layers 1 to 3 of four, with ``STATES`` three of these of linear attention or
    Mamba-2, or which has a module for multi-token prediction."""
    folder = tmp_path_factory.mktemp("heads")
    if request.param in MODULES:
        family, cut = MODULES[request.param]
        return session_of(add_mtp(make_checkpoint(folder / "target", family, cut=cut, seed=1)), "mtp")
    cut = {"below the cut": 3, "above the cut": 2}.get(request.param)
    target = make_checkpoint(folder / "target", STATES.get(request.param, "llama"), cut=cut, num_hidden_layers=4)
    return session_of(target, make_head(folder / "head", target, **HEAD))


class Helped(HeadDraft):
    """A head some of whose drafts are replaced by right ones, so that some are accepted."""

    expected: dict
    rng: random.Random

    def _run(self, passes, slots):
        tokens, hidden = super()._run(passes, slots)
        for row, entries in enumerate(passes):
            sequence, share = entries.sequence, self.rng.random()
            right = self.expected[sequence.request_id, sequence.index][0]
            number = int(entries.positions[-1]) + 2 - sequence.num_prompt_tokens
            if entries.is_wanted and share < 0.6 and 0 <= number < len(right):
                tokens[row] = right[number]
        return tokens, hidden


def run_alone(session, request):
    """(tokens, reason) of each sequence of a request, each by itself."""
    results = {}
    for index in range(request.params.n):
        engine = LLMEngine(session=session, num_pages=100)
        params = dataclasses.replace(request.params, n=1, seed=(request.params.seed or 0) + index)
        engine.add_request("alone", request.prompt, params)
        outputs = [output for _ in iter(engine.has_unfinished, False) for output in engine.step()]
        tokens = [token for output in outputs for token in output.new_token_ids]
        results[request.request_id, index] = tokens, outputs[-1].finish_reason
    return results


def test_tokens_are_those_of_plain_decoding(session, seeds, full, monkeypatch):
    """Chunks, preemption, prefix hits, siblings and cancelled neighbours, greedy and sampled with a seed; in some steps
    nothing is drafted or noted, and some prompts have no entries."""
    due = random.Random()
    monkeypatch.setattr(DraftLength, "is_due", lambda self, num_sequences: due.random() < 0.75)
    monkeypatch.setattr(DraftLength, "pays_for_prompts", property(lambda self: due.random() < 0.75))
    monkeypatch.setattr(runner, "HeadDraft", Helped)
    counts = Counter()
    snapshots = {"snapshot_every": 1, "num_snapshots": 6} if session.manifest.state_bytes else {}
    for seed in seeds(6, 200):
        due.seed(seed)
        plan, rng = random_plan(seed, page_sizes=(4,), vocab_size=320, max_prompt=30, max_new=12), random.Random(seed)
        if seed % 3 == 0:
            plan.num_pages, plan.max_num_seqs = min(plan.num_pages, 14), 6
        options = plan.limits | plan.prefixes(**snapshots)
        expected = {key: found for request in plan.requests for key, found in run_alone(session, request).items()}
        speculative = SpeculativeConfig(session.manifest.draft_head.kind, rng.choice([1, 3, 7]))
        engine = LLMEngine(session=session, speculative=speculative, **options)
        engine.runner.head_draft.expected, engine.runner.head_draft.rng = expected, rng
        tokens, reasons, aborted = run_plan(engine, plan)
        check_tokens(tokens, reasons, aborted, expected, seed)
        stats = engine.stats()
        assert stats["num_used_pages"] == 0 and stats["num_failed_steps"] == 0
        counts.update(
            preempted=stats["num_preemptions"],
            reused=stats["num_reused_tokens"],
            accepted=stats["num_accepted_draft_tokens"],
            rejected=stats["num_draft_tokens"] - stats["num_accepted_draft_tokens"],
            aborted=len(aborted),
            siblings=sum(request.params.n > 1 for request in plan.requests),
        )
    assert min(counts.values()) > 0, counts
