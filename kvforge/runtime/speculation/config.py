"""What an engine is asked to speculate with, in vLLM's parameter names."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from kvforge.common.errors import EngineError
from kvforge.kv_policies import Need
from kvforge.manifest import HeadKind, Manifest
from kvforge.runtime.sessions.missing import NO_DRAFT_HEAD, NO_EARLY_EXIT

Method = Literal["ngram", "suffix", "draft_model", "early_exit", HeadKind]
BY_HEAD: tuple[str, ...] = get_args(HeadKind)
"""Methods of an engine's draft head, each of a head of its own kind."""
Sharing = Literal["scope", "all", "off"]
MOST_SUFFIX_TOKENS = 1 << 24
LONGEST_LOOKUP = 64
"""Of ``prompt_lookup_max``: what a lookup takes in every step grows with it where a text repeats itself."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """Where drafts come from and how long they are.

    Attributes:
        method: "ngram" looks the newest tokens up in the sequence itself, "suffix" also in outputs of other requests,
            "draft_model" asks a smaller engine, "early_exit" the engine's own early-exit head, within the step,
            "eagle3" and "mtp" its draft head of that kind, before it.
        num_speculative_tokens: drafts of a sequence in one step at most.
        prompt_lookup_min, prompt_lookup_max: newest tokens that "ngram" looks for, the most first; at most 64.
        draft_engine: engine directory of "draft_model".
        suffix_sharing: which requests "suffix" takes outputs from: "scope" those with the same ``draft_scope``, none
            without one; "all"; "off", none.
        suffix_max_tokens: tokens of outputs that "suffix" keeps, the newest, with at most 500 bytes for each.

    Raises:
        EngineError: the parts do not fit one another.
    """

    method: Method
    num_speculative_tokens: int = 4
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    draft_engine: Path | None = None
    suffix_sharing: Sharing = "scope"
    suffix_max_tokens: int = 65536

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise EngineError(f"speculative method {self.method!r} is unknown; give {', '.join(get_args(Method))}.")
        if self.num_speculative_tokens < 1:
            raise EngineError(f"num_speculative_tokens is {self.num_speculative_tokens}; give 1 or more.")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= LONGEST_LOOKUP:
            raise EngineError(
                f"prompt_lookup_min is {self.prompt_lookup_min} and prompt_lookup_max {self.prompt_lookup_max}; "
                f"give 1 <= min <= max <= {LONGEST_LOOKUP}."
            )
        if self.suffix_sharing not in get_args(Sharing):
            raise EngineError(f"suffix_sharing is {self.suffix_sharing!r}; give {', '.join(get_args(Sharing))}.")
        if not 1 <= self.suffix_max_tokens <= MOST_SUFFIX_TOKENS:
            raise EngineError(f"suffix_max_tokens is {self.suffix_max_tokens}; give 1 to {MOST_SUFFIX_TOKENS}.")
        if (self.draft_engine is not None) != (self.method == "draft_model"):
            raise EngineError("a draft engine and the method draft_model go together; give both or neither.")

    @property
    def by_head(self) -> bool:
        """Whether the engine's draft head drafts."""
        return self.method in BY_HEAD


def check_speculation(
    config: SpeculativeConfig | None,
    early_exit_threshold: float | None,
    manifest: Manifest,
    early_exit_prompts: bool = False,
) -> None:
    """Raise EngineError unless an engine can speculate so, or leave early with this probability.

    Raises:
        EngineError: both are asked for, prompts are to leave early without a probability, or the engine was not built
            for what is asked.
    """
    if early_exit_prompts and early_exit_threshold is None:
        raise EngineError("early_exit_prompts goes with early_exit_threshold; give a threshold, or leave it out.")
    if config is not None and not isinstance(config, SpeculativeConfig):
        raise EngineError(f"speculative is {config!r}; give a SpeculativeConfig, or None for no drafts.")
    if early_exit_threshold is not None:
        if not 0.0 < early_exit_threshold <= 1.0:
            raise EngineError(f"early_exit_threshold is {early_exit_threshold}; give a probability above 0, at most 1.")
        if manifest.has_observers:
            raise EngineError(
                f"the engine's KV policy {manifest.kv_policy} observes the queries of all layers, which tokens that "
                "exit early do not reach; leave early_exit_threshold out or build an engine with another --kv-policy."
            )
        if config is not None:
            raise EngineError("early_exit_threshold does not go with speculative decoding; leave one of them out.")
    if (early_exit_threshold is not None or (config is not None and config.method == "early_exit")) and (
        not manifest.model.early_exit
    ):
        raise EngineError(NO_EARLY_EXIT)
    if config is not None and config.by_head:
        _check_head(config, manifest)
    if config is not None and Need.ONE_QUERY in manifest.policy.needs:
        raise EngineError(
            f"the engine's KV policy {manifest.kv_policy} takes one query per sequence and step, so it verifies no "
            "drafts; leave speculation out or build an engine with --kv-policy full."
        )
    if config is not None and config.num_speculative_tokens > manifest.max_draft_len:
        count, maximum = config.num_speculative_tokens, manifest.max_draft_len
        if maximum == 0:
            raise EngineError(
                f"the engine was built for no drafts; rebuild with kvforge build --max-draft-len {count}."
            )
        raise EngineError(
            f"num_speculative_tokens is {count}, but the engine was built for {maximum} drafts of a sequence in a "
            f"step; lower it or rebuild with kvforge build --max-draft-len {count}."
        )


def _check_head(config: SpeculativeConfig, manifest: Manifest) -> None:
    if manifest.draft_head is None:
        raise EngineError(NO_DRAFT_HEAD)
    if manifest.draft_head.kind != config.method:
        raise EngineError(
            f"speculative method {config.method} needs a draft head of that kind, and the engine's is for "
            f"{manifest.draft_head.kind}; choose that method, or build an engine with another --draft-head."
        )
