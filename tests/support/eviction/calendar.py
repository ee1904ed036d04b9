"""When each rule evicts: pure numbers of the prompt's length and of the tokens computed."""

WHEN = {
    "streaming": "always",
    "recent": "end_decode",
    "h2o": "end_decode",
    "scissorhands": "end_decode",
    "tova": "end_decode",
    "snapkv": "end",
    "adakv": "end",
    "pyramid": "end",
    "simlayer": "end",
    "fastgen": "end",
    "kvzip": "end",
    "kvzap": "end_blocks",
    "batchmax": "always",
    "keydiff": "always",
    "roco": "always",
    "keydiff+adakv": "end",
    "h2o+pyramid": "end",
    "expected": "end",
    "squeeze": "end",
    "keydiff+squeeze": "end",
}
"""Of every rule; batchmax with ``decode_only`` is ``end_decode``."""


def calendar(
    rule: str, num_prompt: int, num_tokens: int, budget: int, block: int, decode_only: int = 0, **_: int
) -> list[tuple[int, int]]:
    """Return (p, keep), ascending: with p tokens computed, and before the next of ``num_tokens`` is, each lane keeps
    ``keep`` of its own. Other parameters of the rule may be given: they do not matter here.

    Raises:
        ValueError: the rule is unknown or a block leaves nothing of the budget.
    """
    if rule not in WHEN:
        raise ValueError(f"{rule} is no rule; the oracle knows {', '.join(WHEN)}.")
    when = "end_decode" if decode_only else WHEN[rule]
    if when == "end_blocks":
        return [(computed, budget) for computed in range(num_prompt, num_tokens, block)]
    if when == "end":
        return [(num_prompt, budget)] if budget < num_prompt < num_tokens else []
    if not 1 <= block < budget:
        raise ValueError(f"block is {block}; give one from 1 to budget - 1 = {budget - 1}.")
    first = budget if when == "always" else max(num_prompt, budget)
    return [(computed, budget - block) for computed in range(first, num_tokens, block)]
