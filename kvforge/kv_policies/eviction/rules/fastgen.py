"""FastGen (arXiv 2310.01801): every head keeps the fewest kinds of tokens that its attention is content with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvforge.kv_policies.eviction.budgets.ceiling import CeilingBudget
from kvforge.kv_policies.eviction.names import ScoredLanes, Slots, Tensor
from kvforge.kv_policies.eviction.observation import Statistic
from kvforge.kv_policies.policy import check_largest

_SPECIAL, _PUNCTUATION, _FREQUENT, _RECENT, _OTHER = range(4, -1, -1)


@dataclass(frozen=True)
class FastGen(CeilingBudget):
    """A head keeps the special tokens; where these are too few, punctuation too; then the ``frequent`` tokens that got
    most attention; then the newest ``recent``; then everything (section 3.3, table 1). They are too few while they have
    got less than ``recover_percent`` of what the prompt's last ``window`` queries gave (there of what all gave).

    The paper has no budget, so that a sequence's bytes depend on its text. Here all heads of all owners have ``budget``
    tokens on average. Where they want more, those go back to fewer kinds that recover most with them. What is then left
    goes, page by page, to the heads that recover least. ``frequent`` and ``recent`` are 3/10 of the budget where they
    are 0 (there of the prompt).

    Raises:
        BuildError: also for more than 100% to recover.
    """

    window: int = 32
    frequent: int = 0
    recent: int = 0
    recover_percent: int = 95

    name: ClassVar[str] = "fastgen"
    title: ClassVar[str] = "FastGen"
    statistic: ClassVar[Statistic] = Statistic.SUM
    reads_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for parameter in ("frequent", "recent"):
            if getattr(self, parameter) == 0:
                object.__setattr__(self, parameter, max(3 * self.budget // 10, 1))
        super().__post_init__()
        check_largest(self, "recover_percent", 100)

    @property
    def num_observed(self) -> int:
        return self.window

    def kinds(self, slots: Slots) -> Tensor:
        """Return ``[S, kv_heads, L]`` float32: the kind of each token, the first that it is of."""
        import torch

        kind = torch.full_like(slots.position, _OTHER)
        for has, value in (
            (slots.newest(self.recent), _RECENT),
            (slots.largest(slots.mass, self.frequent), _FREQUENT),
            (slots.is_punctuation, _PUNCTUATION),
            (slots.is_special, _SPECIAL),
        ):
            kind = torch.where(has, value, kind)
        return kind

    def score(self, slots: Slots) -> Tensor:
        return slots.ranked(self.kinds(slots), slots.mass)

    def divide(self, owners: Sequence[ScoredLanes], page_size: int) -> list[list[int]]:
        import torch

        num_heads, length = owners[0].best.shape
        most = min(self.max_pages(num_heads, page_size), length // page_size)
        total = len(owners) * num_heads * (self.budget // page_size)
        # Of every head, and all of its tokens from the best on: their kinds, and the share of attention up to there.
        kinds = torch.cat([self.kinds(one.slots)[0].gather(1, one.order) for one in owners])
        masses = torch.cat([one.slots.mass[0].gather(1, one.order) for one in owners]).double()
        shares = masses.cumsum(1) / masses.sum(1, keepdim=True)
        counts = torch.stack([(kinds >= kind).sum(1) for kind in (_SPECIAL, _PUNCTUATION, _FREQUENT, _RECENT)], 1)
        recovered = shares.gather(1, (counts - 1).clamp(min=0)).masked_fill(counts == 0, 0.0)
        wanted = torch.cat((-(-counts // page_size), torch.full_like(counts[:, :1], most)), 1).clamp(1, most)
        chosen = self.within(wanted.tolist(), recovered.tolist(), total)
        pages = levelled(chosen, shares[:, page_size - 1 :: page_size][:, : most - 1].tolist(), total)
        return [pages[first : first + num_heads] for first in range(0, len(pages), num_heads)]

    def within(self, wanted: Sequence[Sequence[int]], recovered: Sequence[Sequence[float]], total: int) -> list[int]:
        """Return the pages of every head, of those that ``wanted`` has for each of the five choices: those of the first
        that recovers enough, or of one before it while all heads together have more than ``total``. ``recovered`` has
        what the first four choices recover."""
        choices = [sum(share < self.recover_percent / 100 for share in shares) for shares in recovered]
        pages = [of_head[choice] for of_head, choice in zip(wanted, choices, strict=True)]
        steps = [(head, fewer) for head, choice in enumerate(choices) for fewer in range(choice - 1, -1, -1)]
        for head, fewer in sorted(steps, key=lambda step: -recovered[step[0]][step[1]]):
            if sum(pages) <= total:
                break
            pages[head] = wanted[head][fewer]
        return pages


def levelled(pages: Sequence[int], shares: Sequence[Sequence[float]], total: int) -> list[int]:
    """Return ``pages`` of every head, at least one, with as many more or fewer as make ``total``: in all, a page goes
    to the head that recovers least before it, of equals to one with fewer pages, then to an earlier one. ``shares`` are
    what each head recovers by one page, by two, and so on."""
    result = list(pages)
    steps = sorted((share, page, head) for head, of_head in enumerate(shares) for page, share in enumerate(of_head, 1))
    missing = total - sum(pages)
    more = [head for _, page, head in steps if page >= pages[head]][: max(missing, 0)]
    fewer = [head for _, page, head in reversed(steps) if page < pages[head]][: max(-missing, 0)]
    for head in more:
        result[head] += 1
    for head in fewer:
        result[head] -= 1
    return result
