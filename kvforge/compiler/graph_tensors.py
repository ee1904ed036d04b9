"""The names of what goes into the graphs of target ``tensorrt`` and of what comes out."""

INPUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "lower": {
        "input_ids": ("tokens",),
        "positions": ("tokens",),
        "slot_mapping": ("tokens",),
        "query_start": ("starts",),
        "kv_length": ("sequences",),
        "page_table": ("sequences", "columns"),
    },
    "upper": {
        "hidden": ("tokens",),
        "survivor_index": ("survivors",),
        "survivor_start": ("starts",),
        "positions": ("tokens",),
        "kv_length": ("sequences",),
        "page_table": ("sequences", "columns"),
    },
    "early_exit": {"hidden": ("tokens",), "survivor_index": ("survivors",)},
    "verify": {
        "logits": ("rows",),
        "draft_ids": ("drafts",),
        "draft_start": ("starts",),
        "draft_probs": ("proposals",),
        "temperature": ("sequences",),
        "uniform": ("rows",),
    },
}
"""The inputs of each graph that are no pools, in order, and the names of their dynamic dimensions, which come first."""

RESULTS = {
    "lower": ("hidden",),
    "upper": ("logits",),
    "early_exit": ("logits",),
    "verify": ("accepted", "next_token"),
}
"""The outputs of each graph that are no pools."""
