"""Caches merged in pairs: the model with its cache in the open, what is restored of it, its bytes, and the report."""

import dataclasses

import pytest
import torch

from kvforge.swiftkv import SwiftKVForCausalLM
from model_defs import load_config
from perf.quality.cached_model import CachedModel, MergedPairs, answers, divergence
from perf.quality.minicache import markdown, summarise
from perf.quality.minicache_rows import MERGED, MINICACHE, ROWS, TEACHER, UNTRAINED, bytes_per_token
from perf.training.config import TINY_MODEL
from tests.support.rounding import assert_near, model_error

HF = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
CUT = HF | {"model_type": "llama_swiftkv", "num_key_value_layers": 1, "key_value_group_size": 2}
IDS = torch.randint(0, 40, (3, 12), generator=torch.Generator().manual_seed(0))


def small_model(hf: dict = HF) -> SwiftKVForCausalLM:
    torch.manual_seed(0)
    model = SwiftKVForCausalLM(load_config(hf))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize("hf", [HF, CUT], ids=["plain", "shared"])
def test_pieces_are_the_whole(hf: dict) -> None:
    """Any cutting of a sequence gives the logits of all at once; so does a merge that retains everything."""
    model = small_model(hf)
    with torch.no_grad():
        expected = model(IDS)
    for cached in [CachedModel(model)] + ([CachedModel(model, MergedPairs(2, 0.6, 2.0))] if hf is HF else []):
        found = [cached(piece) for piece in IDS.split([5, 1, 4, 2], dim=1)]
        assert_near(torch.cat(found, 1), expected, model_error(model.sizes, IDS.shape[1]))
        assert cached.length == 12
    kl, same = divergence(CachedModel(model), IDS, expected, 7)
    assert kl.shape == same.shape == (3, 5) and same.all() and kl.abs().max() < model_error(model.sizes, 12)


def test_merging_changes_what_later_tokens_read_and_no_more() -> None:
    model = small_model()
    with torch.no_grad():
        expected = model(IDS)
    pairs = MergedPairs(2, 0.6, 0.05)
    merged = CachedModel(model, pairs)
    assert_near(merged(IDS[:, :8]), expected[:, :8], model_error(model.sizes, 8))  # the prompt reads its own
    plain = CachedModel(model)
    plain(IDS[:, :8])
    for layer in range(4):
        for half in (0, 1):
            own, kept = plain.past[layer][half], merged.past[layer][half]
            assert torch.equal(own, kept) == (layer < 2)
            assert_near(kept.norm(dim=-1), own.norm(dim=-1), model_error(model.sizes, 8))
    kept, own = (torch.stack([m.past[2][1], m.past[3][1]]) for m in (merged, plain))
    same = (kept == own).flatten(-1).all(-1)
    assert 0 < int(same.sum()) < same.numel() / 2  # those that are retained
    assert 0 < pairs.retained_share < 0.5
    assert (merged(IDS[:, 8:9]) - expected[:, 8:9]).abs().max() > 0.01


def test_the_prompt_decides_what_is_retained_later() -> None:
    """A later vector is retained where it is further apart than the prompt's limit, which does not change."""
    first, second = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    kv = {0: (first.view(1, 1, 1, 2),) * 2, 1: (second.view(1, 1, 1, 2),) * 2}
    near = {0: kv[0], 1: (torch.tensor([1.0, 0.5]).view(1, 1, 1, 2),) * 2}
    prompt = {layer: tuple(torch.cat([a, b], 1) for a, b in zip(kv[layer], near[layer], strict=True)) for layer in kv}
    pairs = MergedPairs(0, 0.5, 0.05)
    restored = pairs(prompt, True)
    assert pairs.retained_share == 0.5
    assert torch.equal(restored[0][0][:, 0], prompt[0][0][:, 0]) and torch.equal(
        restored[1][1][:, 0], prompt[1][1][:, 0]
    )
    assert not torch.equal(restored[0][0][:, 1], prompt[0][0][:, 1])
    again = pairs(near, False), pairs(kv, False)
    assert not torch.equal(again[0][1][0], near[1][0]) and torch.equal(again[1][1][0], kv[1][0])


def test_answers_are_greedy_by_the_length_of_the_prompt() -> None:
    model = small_model()
    prompts = [IDS[0, :5].tolist(), IDS[1, :9].tolist(), IDS[2, :5].tolist()]
    found = answers(lambda: CachedModel(model), prompts, 6, frozenset())
    for prompt, tokens in zip(prompts, found, strict=True):
        ids = list(prompt)
        for token in tokens:
            with torch.no_grad():
                assert int(model(torch.tensor([ids]))[0, -1].argmax()) == token
            ids.append(token)
        assert len(tokens) == 6
    end = found[1][2]
    stopped = answers(lambda: CachedModel(model), prompts, 6, frozenset([end]))[1]
    assert stopped == found[1][: found[1].index(end) + 1]


def test_bytes_by_hand() -> None:
    """8 layers of K and V, 2 heads of 64 numbers in 2 bytes. Merged from layer 4: two pairs with two lengths each."""
    vector = 2 * 64
    shared = dataclasses.replace(TINY_MODEL, cut=4, group_size=2)
    assert bytes_per_token(TINY_MODEL, TEACHER, 0) == 8 * 4 * vector
    assert bytes_per_token(shared, UNTRAINED[0], 0) == 6 * 4 * vector
    assert bytes_per_token(TINY_MODEL, MINICACHE, 0.25) == 4 * 4 * vector + 2 * 4 * (vector + 4 + 0.25 * (vector + 4))
    assert bytes_per_token(TINY_MODEL, MERGED[-1], 0) == 6 * 4 * vector


def test_the_report_has_every_row_and_pairs_the_seeds() -> None:
    slugs = [row.slug for row in ROWS]
    assert len(set(slugs)) == len(ROWS) == 26
    estimate = {"value": 0.5, "low": 0.4, "high": 0.6}
    cells = {
        row.slug: {"name": row.name, "curve": [[0, 1.0], [10, index / 10]]}
        if row.is_trained
        else {
            "name": row.name,
            "kl": estimate,
            "agreement": estimate,
            "retained": 0.1,
            "distance": [0.1, 0.2, 0.3],
            "bytes_per_token": 3072.0,
            "correct": {"task": [True, index % 2 == 0]},
        }
        for index, row in enumerate(ROWS)
    }
    report = {
        "rows": summarise(cells),
        "document_prompt": 256,
        "documents": 32,
        "curve_documents": 8,
        "prompt_tokens": 300,
        "steps": 30,
        "tokens_per_step": 2048,
        "machine": "a machine",
        "command": "a command",
    }
    text = markdown(report)
    assert all(f"| {row.name} |" in text for row in ROWS if not row.is_trained)
    assert "| `minicache` | 1.0000 | 2.1000 | 1.7000, 2.1000, 2.5000 | +0.2000, +0.2000, +0.2000 |" in text
    assert "5% are below 0.10, half below 0.20, 95% below 0.30" in text
