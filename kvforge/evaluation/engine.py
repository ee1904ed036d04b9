"""Prompts to answers through an engine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvforge.common.errors import EngineError, KvforgeError
from kvforge.common.exact_intervals import ExactTokens
from kvforge.evaluation.score import MAX_ANSWER_TOKENS, STOP
from kvforge.manifest import TOKENIZER_DIR, Manifest, load_manifest
from kvforge.runtime import LLM, SamplingParams
from kvforge.runtime.requests.checks import longer_sequences
from kvforge.runtime.requests.outputs import CompletionOutput
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.tokenization.files import tokens_before_text


@dataclass(frozen=True)
class AnsweredPrompt:
    """What an engine said: token ids of the prompt and of the answer, and the answer's text without its stop."""

    prompt: list[int]
    token_ids: list[int]
    text: str


def check_length(manifest: Manifest, length: int) -> None:
    """Raise KvforgeError unless prompts of `length` tokens and their answers fit the engine."""
    if length + MAX_ANSWER_TOKENS > manifest.max_seq_len:
        raise KvforgeError(
            f"prompts of {length} tokens and {MAX_ANSWER_TOKENS} for the answer exceed the engine's max_seq_len "
            f"{manifest.max_seq_len}; use a smaller --length, or {longer_sequences(manifest.max_seq_len)}."
        )


def load_tokenizer(engine_dir: Path) -> Tokenizer:
    """Return an engine's tokenizer. Raises EngineError where it has none."""
    tokenizer = Tokenizer.from_dir(Path(engine_dir) / TOKENIZER_DIR)
    if tokenizer is None:
        raise EngineError(f"{engine_dir} has no tokenizer/tokenizer.json; rebuild it from a checkpoint that has one")
    return tokenizer


def check_finished(outputs: Iterable[CompletionOutput]) -> None:
    """Raise EngineError where an answer ended with an error, which is no wrong answer."""
    for output in outputs:
        if output.finish_reason == "error":
            raise EngineError(f"a prompt failed, so there is no score: {output.stop_reason}.")


class EngineGenerator:
    """Greedy answers of an engine directory. Raises KvforgeError when `length` tokens do not fit it, or it cannot exit
    early with that threshold, or predicts no cache of which tokens could be exact."""

    def __init__(
        self,
        engine_dir: Path,
        length: int,
        show_progress: bool = True,
        early_exit_threshold: float | None = None,
        exact_tokens: ExactTokens | None = None,
        early_exit_prompts: bool = False,
    ) -> None:
        check_length(load_manifest(engine_dir), length)
        self._tokenizer = load_tokenizer(engine_dir)
        self._lead = tokens_before_text(self._tokenizer.backend)
        own: dict[str, Any] = {} if exact_tokens is None else {"exact_tokens": exact_tokens}
        self.llm = LLM(
            engine_dir, early_exit_threshold=early_exit_threshold, early_exit_prompts=early_exit_prompts, **own
        )
        self._params = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS, stop=list(STOP))
        self._show_progress = show_progress

    def __call__(self, prompts: Sequence[str]) -> list[str]:
        """The texts of ``answer``."""
        return [answer.text for answer in self.answer(prompts)]

    def answer(self, prompts: Sequence[str]) -> list[AnsweredPrompt]:
        """Answers in order. Raises EngineError where one fails."""
        ids = [self._lead + self._tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
        results = self.llm.generate(ids, self._params, use_tqdm=self._show_progress)
        outputs = [result.outputs[0] for result in results]
        check_finished(outputs)
        return [
            AnsweredPrompt(prompt, output.token_ids, output.text) for prompt, output in zip(ids, outputs, strict=True)
        ]
