"""Prompts to texts through an engine, for `evaluate`."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from kvforge.engine import Manifest, load_manifest
from kvforge.errors import EngineError, KvforgeError
from kvforge.evaluation.score import MAX_ANSWER_TOKENS, STOP


def check_length(manifest: Manifest, length: int) -> None:
    """Raise KvforgeError unless prompts of `length` tokens and their answers fit the engine."""
    if length + MAX_ANSWER_TOKENS > manifest.max_seq_len:
        raise KvforgeError(
            f"prompts of {length} tokens and {MAX_ANSWER_TOKENS} for the answer exceed the engine's max_seq_len "
            f"{manifest.max_seq_len}; use a smaller --length or rebuild with a larger --max-seq-len"
        )


class EngineGenerator:
    """Greedy answers of an engine directory. Raises KvforgeError when `length` tokens do not fit it."""

    def __init__(self, engine_dir: Path, length: int, show_progress: bool = True) -> None:
        from kvforge.runtime import LLM, SamplingParams

        check_length(load_manifest(engine_dir), length)
        self._llm = LLM(engine_dir)
        tokenizer_file = Path(engine_dir) / "tokenizer" / "tokenizer.json"
        if not tokenizer_file.exists():
            raise EngineError(
                f"{engine_dir} has no tokenizer/tokenizer.json; rebuild it from a checkpoint that has one"
            )
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._params = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS, stop=list(STOP))
        self._show_progress = show_progress

    def count_tokens(self, text: str) -> int:
        """Tokens of `text` without special tokens."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def __call__(self, prompts: Sequence[str]) -> list[str]:
        ids = [self._tokenizer.encode(prompt).ids for prompt in prompts]
        results = self._llm.generate(ids, self._params, use_tqdm=self._show_progress)
        outputs = [result.outputs[0] for result in results]
        for output in outputs:
            if output.finish_reason == "error":
                raise KvforgeError(f"an evaluation prompt failed, so there is no score: {output.stop_reason}")
        return [output.text for output in outputs]
