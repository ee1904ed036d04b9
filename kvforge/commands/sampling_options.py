"""Options of the commands that generate: how tokens are chosen and where a text ends."""

import argparse
from typing import Any


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """Declare them; ``max_tokens`` is the default, None for what the context holds."""
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help="tokens at most" + ("" if max_tokens else " (default: what the context holds)"),
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of sampling; 0 is greedy")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="keep K tokens; 0: all")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep this probability mass")
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="drop tokens below P times the most probable one"
    )
    parser.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="for tokens that are there")
    parser.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="X", help="for each time that tokens are there"
    )
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="divides their logits")
    parser.add_argument(
        "--seed", type=int, default=None, metavar="N", help="make sampling repeatable (default: by chance)"
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times"
    )
    parser.add_argument(
        "--bad-word",
        action="append",
        default=[],
        metavar="TEXT",
        dest="bad_words",
        help="never generate this text; may be given several times",
    )


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``SamplingParams`` that they say, ``max_tokens`` aside."""
    return dict(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=args.stop,
        bad_words=args.bad_words,
    )
