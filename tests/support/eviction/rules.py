"""Each rule's score, from its paper: one function per rule.

A function gets the lanes of an owner, the index of the one in question and the moment, and returns which of the lane's
entries are protected and the score of each: the protected stay before all others, then larger scores, then newer
positions.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tests.support.eviction.entries import Entry, Lane, Moment

ALL = -1
"""A rule observes every query."""
SPECIAL = {1, 2}
PUNCTUATION = {3 + ord(letter) for letter in "!\"#%&'()*,-./:;?@[\\]_{}"}
"""Ids of the tokenizer of ``tests.support.models.checkpoints``."""


@dataclass(frozen=True)
class Ranking:
    """Of each entry whether it is protected, or how much, and its score.

    ``slack`` is the smallest difference that decided what is protected. ``leanings`` are, where scores are counts, how
    far each query that could count was from the other side: negative where it counts. ``unit`` is how large what is
    compared is at least, where the scores do not say.
    """

    protected: list[bool] | list[int]
    scores: list[float]
    slack: float = math.inf
    leanings: list[list[float]] | None = None
    unit: float = 0.0


def _sum_of_weights(entry: Entry) -> float:
    return sum(look.weight for look in entry.looks)


def streaming(lanes: list[Lane], head: int, now: Moment) -> Ranking:
    """StreamingLLM (arXiv 2309.17453, section 3.2): the first ``sinks`` positions and the newest ones."""
    sinks = now.parameters.get("sinks", 4)
    return Ranking([e.position < sinks for e in lanes[head]], [float(e.position) for e in lanes[head]])


def recent(lanes: list[Lane], head: int, now: Moment) -> Ranking:
    """The newest ones."""
    return Ranking([False] * len(lanes[head]), [float(e.position) for e in lanes[head]])


def h2o(lanes: list[Lane], head: int, now: Moment) -> Ranking:
    """H2O (arXiv 2306.14048, section 4): the sum of all weights so far; half of the budget is for the newest."""
    newest = now.computed - now.budget // 2
    return Ranking([e.position >= newest for e in lanes[head]], [_sum_of_weights(e) for e in lanes[head]])


def scissorhands(lanes: list[Lane], head: int, now: Moment) -> Ranking:
    """Scissorhands (arXiv 2305.17118, algorithm 2): how many of the last ``history`` queries since the eviction before
    gave less than the mean weight, the fewer the better; the newest ``recent`` are protected.

    The margin is in weights times the number of slots. The weight of an only slot is 1, whatever its key is.
    """
    first = max(now.previous, now.computed - now.parameters.get("history", 400))
    newest = now.computed - now.parameters.get("recent", 10)
    counted = [[look for look in e.looks if look.query >= first] for e in lanes[head]]
    return Ranking(
        [e.position >= newest for e in lanes[head]],
        [-float(sum(look.weight < 1 / look.num_slots for look in looks)) for looks in counted],
        leanings=[[look.weight * look.num_slots - 1 for look in looks if look.num_slots > 1] for looks in counted],
        unit=1.0,
    )


def tova(lanes: list[Lane], head: int, now: Moment) -> Ranking:
    """TOVA (arXiv 2401.06104, section 3.2): the last query's weight, a mean over all heads of the layer."""

    def last_weight(entry: Entry) -> float:
        return sum(look.weight for look in entry.looks if look.query == now.computed - 1)

    return Ranking(
        [False] * len(lanes[head]),
        [sum(map(last_weight, entries)) / len(lanes) for entries in zip(*lanes, strict=True)],
    )


def snapkv(lanes: list[Lane], head: int, now: Moment) -> Ranking:
    """SnapKV (arXiv 2404.14469, section 4): the sum of what the last ``window`` prompt tokens gave, smoothed over
    neighbours before the window; the window is protected."""
    lane, window, kernel = lanes[head], now.parameters.get("window", 32), now.parameters.get("kernel", 5)
    start = max(now.num_prompt - window, 0)
    given = [sum(look.weight for look in e.looks if start <= look.query < now.num_prompt) for e in lane[:start]]
    pooled = []
    for middle in range(start):
        neighbours = range(middle - kernel // 2, middle - kernel // 2 + kernel)
        pooled.append(sum(given[i] for i in neighbours if 0 <= i < start) / kernel)
    in_window = len(lane) - start
    return Ranking([False] * start + [True] * in_window, pooled + [0.0] * in_window)


def batchmax(lanes: list[Lane], head: int, now: Moment) -> Ranking:
    """Batch-Max (arXiv 2412.05693): the mean of all weights that an entry was given, its own query's included."""
    return Ranking([False] * len(lanes[head]), [_sum_of_weights(e) / (now.computed - e.position) for e in lanes[head]])


def keydiff(lanes: list[Lane], head: int, now: Moment) -> Ranking:
    """KeyDiff (arXiv 2504.15364, section 3): how unlike a key is to the mean direction of the lane's keys."""
    keys = torch.stack([e.key for e in lanes[head]])
    mean = (keys / keys.norm(dim=-1, keepdim=True)).mean(0)
    cosines = (keys @ mean) / (keys.norm(dim=-1) * mean.norm())
    return Ranking([False] * len(lanes[head]), [-cosine for cosine in cosines.tolist()], unit=1.0)


def expected(lanes: list[Lane], head: int, now: Moment) -> Ranking:
    """Expected attention (arXiv 2510.00636, section 3): the weight that Gaussian queries at the next positions would
    give, a mean over the group, times the norm of the value; the first ``sinks`` positions are protected."""
    lane, sinks, future = lanes[head], now.parameters.get("sinks", 4), now.parameters.get("future", 512)
    last = lane[-now.parameters.get("window", 64) :]
    noted = [e.queries for e in last if e.queries is not None and e.position >= sinks]
    turned = [sum(now.rotate(q, now.computed + i) for i in range(future)) / future for q in noted]
    others = [i for i, e in enumerate(lane) if e.position >= sinks]
    scores = [0.0] * len(lane)
    for member in range(len(noted[0])):
        queries = torch.stack([q[member] for q in turned])
        mean, keys = queries.mean(0), torch.stack([lane[i].key for i in others])
        exponent = keys @ mean / len(mean) ** 0.5
        if now.parameters.get("covariance", 1):
            covariance = (queries - mean).T @ (queries - mean) / len(queries)
            exponent += torch.einsum("ld,de,le->l", keys, covariance, keys) / (2 * len(mean))
        for i, weight in zip(others, exponent.softmax(0).tolist(), strict=True):
            scores[i] += weight / len(noted[0]) * float(lane[i].value.norm())
    return Ranking([e.position < sinks for e in lane], scores)


def fastgen(lanes: list[Lane], head: int, now: Moment) -> Ranking:
    """FastGen (arXiv 2310.01801, section 3.3): special tokens, punctuation, the ``frequent`` with the largest sum of
    what the last ``window`` queries gave, the newest ``recent``, all others; in each by that sum."""
    lane, three_tenths = lanes[head], max(3 * now.budget // 10, 1)
    first = now.computed - now.parameters.get("window", 32)
    given = [sum(look.weight for look in e.looks if look.query >= first) for e in lane]
    order = sorted(range(len(lane)), key=lambda i: (given[i], lane[i].position), reverse=True)
    count = now.parameters.get("frequent", three_tenths)
    newest = now.computed - now.parameters.get("recent", three_tenths)

    def tier(index: int) -> int:
        token = now.token_ids[lane[index].position]
        if token in SPECIAL:
            return 4
        if token in PUNCTUATION:
            return 3
        if index in order[:count]:
            return 2
        return int(lane[index].position >= newest)

    slack = given[order[count - 1]] - given[order[count]] if count < len(lane) else math.inf
    return Ranking([tier(i) for i in range(len(lane))], given, slack=slack)


def roco(lanes: list[Lane], head: int, now: Moment) -> Ranking:
    """RoCo (arXiv 2402.06262, section 4): the mean weight; the ``spread`` largest standard deviations are protected,
    and the first ``sinks`` positions.

    The margin is the smaller one of that of the deviations and that of the means.
    """
    lane, spread, sinks = lanes[head], now.parameters["spread"], now.parameters.get("sinks", 4)
    means, deviations = [], []
    for entry in lane:
        age = now.computed - entry.position
        means.append(_sum_of_weights(entry) / age)
        squares = sum(look.weight**2 for look in entry.looks) / age
        deviations.append(math.sqrt(max(squares - means[-1] ** 2, 0.0)))
    order = sorted(range(len(lane)), key=lambda i: (deviations[i], lane[i].position), reverse=True)
    wide = set(order[:spread])
    both = 0 < spread < len(lane)
    return Ranking(
        [i in wide or entry.position < sinks for i, entry in enumerate(lane)],
        means,
        slack=deviations[order[spread - 1]] - deviations[order[spread]] if both else math.inf,
    )


def kvzip(lanes: list[Lane], head: int, now: Moment) -> Ranking:
    """KVzip (arXiv 2505.23416, section 3.2): the largest weight that any head of the group gave when the prompt was
    repeated; the first ``sinks`` positions are protected."""
    sinks = now.parameters.get("sinks", 4)
    return Ranking([e.position < sinks for e in lanes[head]], [e.probed for e in lanes[head]])


def kvzap(lanes: list[Lane], head: int, now: Moment) -> Ranking:
    """KVzap (arXiv 2601.07891, section 3.3): what the scorer predicts; the newest ``window`` are protected, and those
    in a page that the prompt's last tokens did not fill, or the tokens that took these places since."""
    newest = max(now.parameters.get("window", 128), now.num_prompt % now.page_size)
    return Ranking(
        [e.position >= now.computed - newest for e in lanes[head]], [e.predicted for e in lanes[head]], unit=1.0
    )


def probes(rule: str, prompt: list[int], parameters: Mapping[str, int]) -> list[list[int]]:
    """Return what is computed behind a prompt before it is evicted from, one after the other: requests to repeat a part
    and that part."""
    if rule != "kvzip":
        return []
    chunk, found = parameters.get("chunk", 512), []
    for start in range(0, len(prompt), chunk):
        request = b"\n\nRepeat the previous context exactly.\n"
        if start:
            request = b"\n\nRepeat the part of the previous context exactly that starts after: "
        words = [byte + 3 for byte in request]
        words += [*prompt[max(start - 8, 0) : start], ord("\n") + 3] if start else []
        found.append(words + prompt[start : start + chunk])
    return found


RULES: dict[str, Callable[[list[Lane], int, Moment], Ranking]] = {
    "streaming": streaming,
    "recent": recent,
    "h2o": h2o,
    "scissorhands": scissorhands,
    "tova": tova,
    "snapkv": snapkv,
    "adakv": snapkv,
    "pyramid": snapkv,
    "squeeze": snapkv,
    "simlayer": streaming,
    "fastgen": fastgen,
    "kvzip": kvzip,
    "kvzap": kvzap,
    "batchmax": batchmax,
    "keydiff": keydiff,
    "expected": expected,
    "roco": roco,
    "keydiff+adakv": keydiff,
    "keydiff+squeeze": keydiff,
    "h2o+pyramid": h2o,
}
"""How many each head keeps of those whose heads share a budget stands in ``budgets.py``."""


def observed(rule: str, parameters: dict[str, int]) -> int:
    """Return how many of the last queries before an eviction a rule looks at, or ``ALL``."""
    last = {
        "scissorhands": parameters.get("history", 400),
        "tova": 1,
        "snapkv": parameters.get("window", 32),
        "adakv": parameters.get("window", 32),
        "pyramid": parameters.get("window", 32),
        "fastgen": parameters.get("window", 32),
        "kvzip": 0,
        "simlayer": 1,
        "expected": parameters.get("window", 64),
        "squeeze": max(parameters.get("window", 32), parameters.get("similar", 32)),
        "keydiff+squeeze": parameters.get("similar", 32),
        **dict.fromkeys(("kvzap", "streaming", "recent", "keydiff", "keydiff+adakv"), 0),
    }
    return last.get(rule, ALL)
