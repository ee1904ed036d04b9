"""How a prompt divides into the chunks that ShadowKV selects from, those that stay exact, and the tail."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptChunks:
    """ShadowKV's parameters and what follows from them for a prompt: see :class:`.policy.ShadowKV`."""

    rank: int = 160
    chunk_size: int = 8
    sparse_budget: int = 2048
    num_outlier_chunks: int = 48
    num_local_tokens: int = 32

    @property
    def max_selected(self) -> int:
        """Chunks that a KV head selects in one step, at most: the places for them in the compact cache."""
        return self.sparse_budget // self.chunk_size

    def num_chunks(self, num_prompt_tokens: int) -> int:
        """Return the chunks of a prompt."""
        return max(num_prompt_tokens - self.num_local_tokens, 0) // self.chunk_size

    def num_selected(self, num_prompt_tokens: int) -> int:
        """Return the chunks that a KV head selects of a prompt: ``max_selected``, or all that are no outliers."""
        return min(self.max_selected, max(self.num_chunks(num_prompt_tokens) - self.num_outlier_chunks, 0))

    def is_factored(self, num_prompt_tokens: int) -> bool:
        """Whether a prompt has more chunks than stay exact or are selected; else it stays as it is."""
        return self.num_chunks(num_prompt_tokens) > self.num_outlier_chunks + self.max_selected

    def tail_length(self, num_prompt_tokens: int) -> int:
        """Return the tokens at a prompt's end that belong to no chunk."""
        return num_prompt_tokens - self.num_chunks(num_prompt_tokens) * self.chunk_size

    def compact_length(self, num_prompt_tokens: int) -> int:
        """Return the tokens of a prompt that stay in pages: selected, outliers and tail; all where none is factored.

        A generated token at position p has the cache index p + compact length - prompt length.
        """
        if not self.is_factored(num_prompt_tokens):
            return num_prompt_tokens
        chunks = self.num_selected(num_prompt_tokens) + self.num_outlier_chunks
        return chunks * self.chunk_size + self.tail_length(num_prompt_tokens)
