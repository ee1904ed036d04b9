"""Options of the commands that write conversations with a chat template."""

import argparse
import json
from pathlib import Path
from typing import Any

from kvforge.common.errors import RequestError, first_line

NAMES = ("system", "chat_template", "chat_template_kwargs")


def add_chat_options(parser: argparse._ActionsContainer) -> None:
    """Declare them."""
    parser.add_argument("--system", metavar="TEXT", help="what the conversation begins with, as the system")
    parser.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="Jinja file in place of the tokenizer's template"
    )
    parser.add_argument(
        "--chat-template-kwargs", metavar="JSON", help="""what the template is told, as '{"enable_thinking": false}'"""
    )


def template_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``LLM.chat_prompt`` that they say. Raises KvforgeError where one cannot be used."""
    from kvforge.tokenization.chat_template import read_template

    options: dict[str, Any] = {}
    if args.chat_template is not None:
        options["chat_template"] = read_template(args.chat_template)
    if args.chat_template_kwargs is not None:
        try:
            options["chat_template_kwargs"] = json.loads(args.chat_template_kwargs)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"--chat-template-kwargs is no JSON ({first_line(error)})", "give an object") from None
        if not isinstance(options["chat_template_kwargs"], dict):
            raise RequestError("--chat-template-kwargs is no JSON object", "give one, such as {}")
    return options


def opening(args: argparse.Namespace) -> list[dict[str, str]]:
    """The messages before the user's first one."""
    return [] if args.system is None else [{"role": "system", "content": args.system}]
