"""FastGen: kinds of tokens, how heads choose among them under a budget, and what an engine knows of its tokens."""

from pathlib import Path

import pytest
import torch

from kvforge.common.errors import BuildError, CheckpointError
from kvforge.compiler import BuildOptions, build_engine
from kvforge.compiler.targets import load_target
from kvforge.kv_policies import parse
from kvforge.kv_policies.eviction.budget_lanes import ScoredLanes
from kvforge.kv_policies.eviction.rules.fastgen import FastGen, levelled
from kvforge.kv_policies.eviction.slots import Slots
from kvforge.manifest import load_manifest
from kvforge.tokenization.files import read_tokenizer
from kvforge.tokenization.token_classes import punctuation_ids, special_ids
from tests.support.models.checkpoints import make_checkpoint

ASSETS = Path(__file__).resolve().parents[3] / "model_defs" / "assets"


def slots_of(masses: list[list[float]], special: set[int], punctuation: set[int]) -> Slots:
    """A sequence with tokens of these kinds at these positions, whose heads gave ``masses``."""
    mass = torch.tensor([masses])
    position = torch.arange(mass.shape[2]).float().expand_as(mass)
    computed = torch.full((1, 1, 1), float(mass.shape[2]))
    of_kind = {"special": special, "punctuation": punctuation}

    def find(position: torch.Tensor, kind: str) -> torch.Tensor:
        return torch.isin(position, torch.tensor(sorted(of_kind[kind])).float())

    unread = lambda *_: mass  # noqa: E731
    return Slots(position, computed, computed, {"mass": mass}, unread, unread, unread, lambda: (mass, mass), find)


def scored(policy: FastGen, slots: Slots) -> ScoredLanes:
    return ScoredLanes.of(slots, policy.score(slots))


def fastgen(text: str) -> FastGen:
    policy = parse(text)
    assert isinstance(policy, FastGen)
    return policy


def test_tokens_are_ranked_by_kind_and_then_by_their_attention() -> None:
    policy = fastgen("fastgen:budget=4,frequent=2,recent=2")
    slots = slots_of([[0.0, 9, 1, 2, 8, 3, 4, 4]], special={0}, punctuation={3, 4})
    assert policy.kinds(slots).tolist() == [[[4, 2, 0, 3, 3, 0, 1, 1]]]
    assert scored(policy, slots).order.tolist() == [[0, 4, 3, 1, 7, 6, 5, 2]]


def test_a_head_takes_the_cheapest_choice_that_recovers_enough() -> None:
    policy = fastgen("fastgen:budget=4,recover_percent=90")
    wanted = [[1, 2, 3, 4, 9]] * 5
    recovered = [[0.9, 1, 1, 1], [0.1, 0.95, 1, 1], [0.1, 0.2, 0.9, 0.9], [0, 0, 0, 0.91], [0, 0.1, 0.5, 0.8]]
    assert policy.within(wanted, recovered, 99) == [1, 2, 3, 4, 9]


def test_too_much_goes_back_to_cheaper_choices_where_these_recover_most() -> None:
    policy = fastgen("fastgen:budget=4,recover_percent=90")
    wanted, recovered = [[1, 2, 3, 4, 9]] * 2, [[0.1, 0.2, 0.3, 0.8], [0.1, 0.4, 0.7, 0.85]]
    for total, pages in [(18, [9, 9]), (17, [9, 4]), (12, [4, 4]), (7, [4, 3]), (6, [4, 2]), (2, [1, 1])]:
        assert policy.within(wanted, recovered, total) == pages, total
    assert policy.within(wanted, recovered, 1) == [1, 1]  # nothing is cheaper


def test_what_is_left_goes_where_least_is_recovered() -> None:
    shares = [[0.5, 0.6, 0.9], [0.1, 0.2, 0.3], [0.2, 0.95, 1.0]]
    assert levelled([1, 1, 1], shares, 3) == [1, 1, 1]
    assert levelled([1, 1, 1], shares, 6) == [1, 3, 2]
    assert levelled([1, 1, 1], shares, 12) == [4, 4, 4]
    assert levelled([4, 4, 4], shares, 7) == [1, 4, 2]
    assert levelled([4, 4, 4], shares, 3) == [1, 1, 1]
    assert levelled([1, 1], [[0.5, 0.5], [0.5, 0.5]], 3) == [2, 1]  # of equals the first


def test_heads_of_all_owners_share_and_none_keeps_more_than_the_ceiling() -> None:
    policy = fastgen("fastgen:budget=4,frequent=1,recent=1,recover_percent=90,ceiling_percent=200")
    content, spread = [9.0, *[0.1] * 11], [1.0] * 12
    owners = [
        scored(policy, slots_of([content, spread], special={0}, punctuation=set())),
        scored(policy, slots_of([content, content], special={0}, punctuation=set())),
    ]
    assert policy.divide(owners, 1) == [[3, 8], [3, 2]]
    assert policy.divide(owners, 2) == [[2, 4], [1, 1]]
    full = fastgen("fastgen:budget=4,frequent=1,recent=1,recover_percent=90,ceiling_percent=100")
    assert full.divide(owners, 1) == [[4, 4], [4, 4]]


def test_more_special_tokens_than_there_is_room_for() -> None:
    policy = fastgen("fastgen:budget=2,frequent=1,recent=1")
    slots = slots_of([[1.0, 1, 1, 1, 1, 1], [5.0, 1, 0, 0, 0, 0]], special=set(range(6)), punctuation=set())
    assert policy.divide([scored(policy, slots)], 1) == [[3, 1]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fastgen:recover_percent=101", "fastgen: recover_percent is 101; give at most 100"),
        ("fastgen:recover_percent=0", "fastgen: recover_percent is 0; give at least 1"),
        ("fastgen:window=0", "fastgen: window is 0; give at least 1"),
        ("fastgen:ceiling_percent=90", "fastgen: ceiling_percent is 90; give at least 100"),
        ("fastgen+adakv", "the KV policy fastgen cannot be combined with 'adakv'"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(BuildError, match=words):
        parse(text)


def test_a_tokenizers_special_tokens_and_its_punctuation() -> None:
    tokenizer = read_tokenizer(ASSETS / "tiny-teacher" / "tokenizer.json")
    text = [tokenizer.decode([token], skip_special_tokens=False) for token in punctuation_ids(tokenizer, 1664)]
    assert set("!?.,:;-()[]{}'") < set(text) and ' "' in text
    assert not [one for one in text if set(one.strip()) & set("$+<=>^`|~ab1\n")]
    assert special_ids(tokenizer, 1664) == (0, 1) and special_ids(tokenizer, 1) == (0,)
    assert max(punctuation_ids(tokenizer, 20)) < 20


def test_an_engine_has_the_ids_of_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a policy that reads them, and no other's; graphs are of no matter here."""
    monkeypatch.setattr(load_target("cpu"), "write_graphs", lambda *_: None)
    checkpoint = make_checkpoint(tmp_path / "checkpoint", num_hidden_layers=1)
    for policy in ("fastgen", "snapkv"):
        build_engine(checkpoint, tmp_path / policy, BuildOptions(dtype="float32", kv_policy=policy))
    manifest = load_manifest(tmp_path / "fastgen")
    assert manifest.special_tokens == (1, 2) and 3 + ord("?") in manifest.punctuation_tokens
    other = load_manifest(tmp_path / "snapkv")
    assert other.special_tokens == () == other.punctuation_tokens
    assert other.to_json()["special_tokens"] == other.to_json()["punctuation_tokens"] == ()
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json; save the tokenizer in fast \(Rust\) format"):
        build_engine(checkpoint, tmp_path / "none", BuildOptions(dtype="float32", kv_policy="fastgen"))
    assert not (tmp_path / "none").exists()
