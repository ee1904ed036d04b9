"""Models with linear attention in most layers: logits are transformers', and tokens do not depend on the schedule."""

from pathlib import Path

import pytest
import torch

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.common.hardware import best_isa
from kvforge.runtime import LLM, LLMEngine, SamplingParams
from model_defs.reference import reference_logits
from tests.cpu.runtime.test_blind_cuts import CACHES, NEW, PAGE, generated, session_of
from tests.cpu.runtime.test_engine_properties import CountingSession, compare
from tests.support.models.checkpoints import MAMBA, load_weights, make_checkpoint
from tests.support.models.logits import transformers_logits
from tests.support.random_cases import Seeds
from tests.support.rounding import assert_near, model_error

FAMILIES = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "lfm2",
    "granitemoehybrid",
    "bamba",
    "nemotron_h",
    "kimi_linear",
)

pytestmark = pytest.mark.usefixtures("one_thread")


def checkpoint(path: Path, family: str, cut: int | None = None) -> Path:
    mamba = {**MAMBA, "num_local_experts": 8} if family == "granitemoehybrid" else {}
    return make_checkpoint(path / "model", family, num_hidden_layers=4, cut=cut, **mamba)


def random_prompt(length: int, seed: int = 3) -> list[int]:
    return torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """In one chunk and in many, from the start and from a snapshot."""
    path = checkpoint(tmp_path, family)
    session, config = session_of(path), read_model_config(open_model(path))
    for length in (1, 8, 17, 33, 70):
        prompt, expected = random_prompt(length), torch.empty(0)
        for chunk in (256, 7, 1):
            engine = LLMEngine(session=session, num_pages=32, max_num_tokens=chunk, snapshot_every=1, num_snapshots=30)
            for _ in range(2):
                tokens, logits = generated(engine, prompt)
                if not len(expected):
                    expected = transformers_logits(path, torch.tensor([*prompt, *tokens]))[length - 1 : -1]
                assert_near(logits, expected, model_error(config, length + NEW), (length, chunk))
                assert tokens == expected.argmax(-1).tolist(), (length, chunk)
            assert engine.stats()["num_reused_tokens"] == (length - 1) // PAGE * PAGE


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_chunks_and_snapshots(family: str, tmp_path: Path) -> None:
    session, prompt, found = session_of(checkpoint(tmp_path, family), CACHES["bf16"]), random_prompt(75), []
    for chunk, every in ((256, 1), (16, 2), (7, 3), (1, 5)):
        engine = LLMEngine(session=session, num_pages=32, max_num_tokens=chunk, snapshot_every=every, num_snapshots=9)
        found += [generated(engine, prompt)[1] for _ in range(2)]
        assert engine.stats()["num_reused_tokens"] == 72
    assert all(torch.equal(logits, found[0]) for logits in found[1:])


@pytest.mark.parametrize("cache", CACHES)
def test_tokens_equal_one_at_a_time(cache: str, tmp_path: Path, seeds: Seeds) -> None:
    """In every format of the cache and of weights, some with a cut; with drafts see ``test_head_draft.py``."""
    path = checkpoint(tmp_path, "qwen3_5_text", cut=2 if cache in ("fp32", "int4", "int8 weights") else None)
    session = CountingSession(session_of(path, CACHES[cache]))
    _, num_different, gaps, counts = compare(session, seeds(16, 200), snapshot_every=1, num_snapshots=12)
    assert num_different == 0 and min(counts[name] for name in ("reused", "aborted", "skipped")) > 0, (gaps, counts)


STATES = [
    *(
        (family, cache, None)
        for family in ("granitemoehybrid", "lfm2", "nemotron_h", "kimi_linear")
        for cache in ("fp32", "int8 weights")
    ),
    *((family, "fp32", cut) for family in ("bamba", "qwen3_5_moe_text") for cut in (None, 2)),
    *((family, "fp32", 2) for family in ("granitemoehybrid", "lfm2", "kimi_linear")),
    ("kimi_linear", "int8 weights", 2),
]
"""Families, caches and cuts."""


@pytest.mark.parametrize(("family", "cache", "cut"), STATES)
def test_tokens_of_other_states_equal_one_at_a_time(
    family: str, cache: str, cut: int | None, tmp_path: Path, seeds: Seeds
) -> None:
    session = CountingSession(session_of(checkpoint(tmp_path, family, cut), CACHES[cache]))
    _, num_different, gaps, counts = compare(session, seeds(16, 200), snapshot_every=1, num_snapshots=12)
    assert num_different == 0 and min(counts[name] for name in ("reused", "aborted", "skipped")) > 0, (gaps, counts)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafted_tokens_equal_one_at_a_time(family: str, tmp_path: Path, seeds: Seeds) -> None:
    """States go back to the last token that is accepted; with a cut where the family may have one. In bf16, where a
    row's bits are its own alone: products in float32 are torch's, whose last bits depend on the number of rows, and in
    one of 200 schedules they chose between two experts of Granite."""
    path = checkpoint(tmp_path, family, None if family == "nemotron_h" else 2)
    session = CountingSession(session_of(path, CACHES["bf16"]))
    _, num_different, gaps, counts = compare(session, seeds(16, 200), 3, snapshot_every=1, num_snapshots=12)
    assert num_different == 0 or best_isa() == "portable", gaps
    assert min(counts[n] for n in ("reused", "accepted", "rejected")) > 0, counts


def test_log_probabilities_of_prompts_are_the_references(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "qwen3_next")
    config, prompt = read_model_config(open_model(path)), torch.tensor(random_prompt(40))
    llm = LLM(session=session_of(path), num_pages=32, max_num_tokens=9, snapshot_every=1)
    expected = reference_logits(config, load_weights(path), prompt)[:-1].log_softmax(-1).gather(1, prompt[1:, None])
    for _ in range(2):
        output = llm.generate(prompt.tolist(), SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
        found = torch.tensor([entry.logprob for entry in (output.prompt_logprobs or ())[1:] if entry is not None])
        assert_near(found, expected[:, 0], model_error(config, len(prompt)), 0)
