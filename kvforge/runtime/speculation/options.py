"""The command line options of speculation and of predicted caches, the same for every program that loads an engine."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from kvforge.common.errors import EngineError
from kvforge.common.exact_intervals import ExactTokens
from kvforge.runtime.speculation.config import Method, Sharing, SpeculativeConfig

_EXACT = ("first", "last", "share")
_METHOD_OF = {
    "draft_engine": "draft_model",
    **dict.fromkeys(("prompt_lookup_min", "prompt_lookup_max"), "ngram"),
    **dict.fromkeys(("suffix_sharing", "suffix_max_tokens"), "suffix"),
}
_DEFAULTS = {field.name: field.default for field in fields(SpeculativeConfig)}


def add_speculation_options(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    group = parser.add_argument_group("speculation", "guess the next tokens and compute them in one step")
    group.add_argument("--speculative-method", choices=get_args(Method), help="where drafts come from (default: none)")
    group.add_argument(
        "--num-speculative-tokens", type=int, metavar="N",
        help=f"drafts of a sequence in a step at most (default: {_DEFAULTS['num_speculative_tokens']})",
    )  # fmt: skip
    group.add_argument("--draft-engine", type=Path, metavar="DIR", help="engine of the method draft_model")
    for name, text in (("max", "newest tokens that ngram looks for at most"), ("min", "and at least")):
        default = _DEFAULTS[f"prompt_lookup_{name}"]
        group.add_argument(f"--prompt-lookup-{name}", type=int, metavar="N", help=f"{text} (default: {default})")
    group.add_argument(
        "--suffix-sharing", choices=get_args(Sharing),
        help="requests whose outputs suffix drafts from: those with the same draft scope (at a server: API key), all, "
        f"or none (default: {_DEFAULTS['suffix_sharing']})",
    )  # fmt: skip
    group.add_argument(
        "--suffix-max-tokens", type=int, metavar="N",
        help=f"tokens of other requests' outputs that are kept (default: {_DEFAULTS['suffix_max_tokens']})",
    )  # fmt: skip
    group.add_argument(
        "--early-exit-threshold", type=float, metavar="P",
        help="without drafts: tokens whose early exit is more probable than P skip the upper layers (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--early-exit-prompts", action="store_true",
        help="with --early-exit-threshold: the last token of a prompt may do so too (default: it never does)",
    )  # fmt: skip
    exact = parser.add_argument_group("prediction", "of an engine that predicts the cache of prompts: what it computes")
    for name, kind, metavar, text in (
        ("first", int, "N", "tokens at a prompt's beginning (default: 0)"),
        ("last", int, "N", "tokens at its end (default: 1)"),
        ("share", float, "X", "share of the prompt, the most important blocks of it (default: 0)"),
    ):
        exact.add_argument(f"--exact-{name}", type=kind, metavar=metavar, help=text)


def speculation_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return ``speculative`` and ``early_exit_threshold``, and where they are given ``early_exit_prompts`` and
    ``exact_tokens``, as ``LLMEngine`` takes them.

    Raises:
        KvforgeError: an option does not go with the method, or one of them is out of its range.
    """
    exact = {name: getattr(args, f"exact_{name}") for name in _EXACT if getattr(args, f"exact_{name}") is not None}
    names = list(_DEFAULTS)[1:]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    method = args.speculative_method
    for name in given:
        wanted = _METHOD_OF.get(name, method)
        if method is None or method != wanted:
            value = f" {wanted}" if wanted else ""
            raise EngineError(f"{_flag(name)} goes with --speculative-method{value}; add that, or leave it out.")
    if method == "draft_model" and "draft_engine" not in given:
        raise EngineError("--speculative-method draft_model needs an engine to draft with; add --draft-engine DIR.")
    if "suffix_max_tokens" in given and given.get("suffix_sharing") == "off":
        raise EngineError("--suffix-max-tokens does not go with --suffix-sharing off; leave one of them out.")
    if args.early_exit_prompts and args.early_exit_threshold is None:
        raise EngineError("--early-exit-prompts goes with --early-exit-threshold; add that, or leave it out.")
    speculative = None if method is None else SpeculativeConfig(method, **given)
    found = {"speculative": speculative, "early_exit_threshold": args.early_exit_threshold}
    found |= {"early_exit_prompts": True} if args.early_exit_prompts else {}
    return found | ({"exact_tokens": ExactTokens(**exact)} if exact else {})


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
