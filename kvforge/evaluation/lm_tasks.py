"""The seven tasks of the SwiftKV paper in lm-evaluation-harness's terms."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PaperTask:
    """How one column of the paper's accuracy tables is measured.

    ``task`` is lm-evaluation-harness's name and ``metric`` the key of its results, ``NAME,FILTER``.
    ``fewshot_as_multiturn``: with the chat template, examples are earlier turns of the conversation.
    """

    name: str
    task: str
    num_fewshot: int
    metric: str
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = False


PAPER_TASKS = (
    PaperTask("arc-challenge", "arc_challenge_llama", 0, "exact_match,strict_match", apply_chat_template=True),
    PaperTask("winogrande", "winogrande", 5, "acc,none"),
    PaperTask("hellaswag", "hellaswag", 10, "acc_norm,none"),
    PaperTask("truthfulqa", "truthfulqa_mc2", 0, "acc,none"),
    PaperTask("mmlu", "mmlu_llama", 5, "exact_match,strict_match", True, True),
    PaperTask("mmlu-cot", "mmlu_cot_llama", 0, "exact_match,strict_match", apply_chat_template=True),
    PaperTask("gsm8k", "gsm8k_cot_llama", 8, "exact_match,strict-match", True, True),
)
"""The tasks of arXiv 2410.03960, in the order of its tables, as the authors' public scripts run them. Their Llama 3.1
variants of ARC, MMLU and GSM8K come from a fork of lm-evaluation-harness; these are upstream's counterparts."""

MAX_ANSWER_TOKENS = 1024
"""Generated tokens at most where a task does not say."""
