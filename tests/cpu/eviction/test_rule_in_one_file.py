"""A rule of one's own is a class with a score, wherever it is defined: built, planned and served as the others are."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest
from torch import Tensor

from kvforge.common.errors import BuildError
from kvforge.compiler import BuildOptions
from kvforge.kv_policies import parse, policies
from kvforge.kv_policies.eviction.calendar import When
from kvforge.kv_policies.eviction.policy import Eviction
from kvforge.runtime import LLMEngine
from tests.support.eviction.forced import run_forced
from tests.support.models.checkpoints import make_checkpoint
from tests.support.sessions.eager import eager_session

if TYPE_CHECKING:
    from kvforge.kv_policies.eviction.slots import Slots

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Multiples(Eviction):
    """Keeps the first token and those at multiples of ``step``, the newest of them, before all others."""

    step: int = 3

    name: ClassVar[str] = "multiples"
    title: ClassVar[str] = "multiples"
    when: ClassVar[When] = When.ALWAYS

    def score(self, slots: "Slots") -> Tensor:
        return slots.position + 1e4 * (slots.position % self.step == 0) + 1e6 * (slots.position == 0)


def brute_force(policy: Multiples, length: int) -> dict[int, list[int]]:
    """The tokens that are kept after each eviction, from a list of positions."""
    kept, evictions = [], {}
    for computed in range(1, length + 1):
        kept.append(computed - 1)
        if len(kept) == policy.budget:
            kept.sort(key=lambda p: (p == 0, p % policy.step == 0, p))
            kept = sorted(kept[policy.block :])
            evictions[computed] = list(kept)
    return evictions


def test_a_rule_defined_elsewhere_keeps_what_it_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(policies(), Multiples.name, Multiples)
    checkpoint, rng = make_checkpoint(tmp_path / "model"), random.Random(0)
    for budget, block, step, page_size in [(12, 4, 3, 4), (9, 1, 2, 1), (16, 15, 5, 16)]:
        spec = f"multiples:budget={budget},block={block},step={step}"
        policy = parse(spec)
        assert policy == Multiples(budget=budget, block=block, step=step)
        limits = {"max_num_seqs": 2, "max_num_tokens": 32, "max_seq_len": 128, "page_size": page_size}
        session = eager_session(checkpoint, BuildOptions(dtype="float32", kv_policy=spec, **limits))
        engine = LLMEngine(session=session, num_pages=200, max_num_tokens=rng.choice((1, 7, 32)))
        ids = [rng.randrange(3, 60) for _ in range(50)]
        kept, _ = run_forced(engine, ids[:30], ids[30:])
        want = brute_force(policy, max(kept))
        assert max(kept) >= 50 - block and list(kept) == list(want)
        for at, owners in kept.items():
            assert all(found == want[at] for heads in owners for found in heads), (spec, at)


def test_its_own_parameters_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(policies(), Multiples.name, Multiples)
    with pytest.raises(BuildError, match="multiples: step is 0; give at least 1"):
        parse("multiples:budget=8,step=0")
