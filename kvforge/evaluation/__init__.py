"""What a model is worth, through its engine: exact match on tasks, perplexity, closeness to a teacher, early exit.

tasks, documents -> engine (generation, scoring) -> counts and sums -> intervals -> report
"""
