"""Exact-match evaluation of generated answers; the model is a callable from prompts to texts."""

from kvforge.evaluation.score import TaskScore, evaluate, score_table, wilson

__all__ = ["TaskScore", "evaluate", "score_table", "wilson"]
