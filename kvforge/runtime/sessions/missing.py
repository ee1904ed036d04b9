"""What an engine says of a graph or table that it was built without; no torch."""

NO_DRAFTS = "this engine verifies no drafts; rebuild it with kvforge build --max-draft-len N."
"""What ``verify`` says of an engine without that graph."""

NO_EARLY_EXIT = (
    "this engine has no early exit; build it from a checkpoint with that head (early_exit in config.json), "
    "without --no-early-exit."
)
"""What ``early_exit`` says of an engine without that graph."""

NO_PREDICTION = "this engine predicts no cache; rebuild it with kvforge build --kv-prediction PREDICTOR."
"""What ``predict`` says of an engine without that graph."""

NO_DRAFT_HEAD = (
    "this engine has no draft head; rebuild it with kvforge build --draft-head HEAD --max-draft-len N: HEAD is an "
    "EAGLE-3 head's path, or mtp for the checkpoint's own module for multi-token prediction."
)
"""What ``draft`` says of an engine without that graph."""

NO_ROPE_TABLES = "this engine has no table of positions, which its KV policy needs; rebuild it with kvforge build."
"""What ``rope_tables`` says of an engine of another KV policy."""
