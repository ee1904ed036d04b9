"""What reading reasoning and calls out of answers costs the gateway, of its own processor time and of served time.

    python -m perf.serving.parsing ENGINE [--streams 64] [--rounds 7] [--output perf/results/NAME]

ENGINE has a tokenizer. The same tokens, reasoning, text and a call as Hermes writes them, come on
``--streams`` streams at once, a token at a time, as if from Triton: once as an answer without tools, whose text is not
read, and once as one with them, by turns. Measured is the processor time of this process from a token to the bytes of
its event. Ratios are medians of pairs. The share of served time is that of the difference, where one core computes the
tokens of all streams at ``--tokens-per-second``. Writes OUTPUT.json and .md.
"""

import argparse
import asyncio
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

from kvforge.gateway.answers.generation import Generation
from kvforge.gateway.answers.tool_answers import chat_format
from kvforge.gateway.endpoints import Endpoint
from kvforge.gateway.engine.tensors import ResponseTokens
from kvforge.gateway.engine.triton import Triton
from kvforge.gateway.model import ServedModel
from kvforge.gateway.options import GatewayOptions
from kvforge.gateway.parsed_request import ParsedRequest
from kvforge.gateway.requests.request_reader import RequestReader
from perf.harness.experiment import Experiment, Report, columns_table, engine_place, number, output, told

THOUGHT = "The user wants to know the weather. I look at the tools: one of them gives it, by city. " * 6
TEXT = "Let me look that up for you. One moment, please; the numbers come from the station at the harbour. " * 4
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Lisbon", "note": "%s"}}\n</tool_call>' % ("so " * 60)
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}\n{CALL}"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "note": {"type": "string"}}},
    },
}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} <tool_call> </tool_call>{% endif %}{% for m in messages %}{{ m.content }}"
    "{% endfor %} <think> </think>"
)
BODY = {"messages": [{"role": "user", "content": "What is the weather?"}], "stream": True}


class Tokens:
    """In Triton's place: every request gets the same tokens, one a response, and others get their turn between them."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    async def generate(self, request: Any, names: Any) -> AsyncIterator[ResponseTokens]:
        """Yield the responses of one request."""
        last = len(self._token_ids) - 1
        for index, token in enumerate(self._token_ids):
            await asyncio.sleep(0)
            yield ResponseTokens(0, [token], finish_reason="length" if index == last else None)


async def answer(model: ServedModel, tokens: Tokens, asked: ParsedRequest) -> int:
    """Return the bytes of one streamed answer's events."""
    generation = Generation(cast(Triton, tokens), model, "chatcmpl-x", asked)
    form, num_bytes = chat_format(generation), 0
    async for delta in generation.deltas():
        form.add(delta)
        if not delta.more:
            num_bytes += len(form.event(delta.index))
    return num_bytes


async def seconds(model: ServedModel, tokens: Tokens, asked: ParsedRequest, streams: int) -> float:
    """Return the processor seconds of so many answers at once."""
    began = time.process_time()
    await asyncio.gather(*(answer(model, tokens, asked) for _ in range(streams)))
    return time.process_time() - began


def make_report(args: argparse.Namespace) -> Report:
    """Measure both kinds of answers by turns."""
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        options = GatewayOptions(engine=args.engine, chat_template=template, tool_call_format="hermes")
        model, plain = (
            ServedModel.load(dataclasses.replace(options, reasoning_format=name)) for name in ("think", "none")
        )
    asked = [
        RequestReader(each, options).read(json.dumps(body).encode(), Endpoint.CHAT)
        for each, body in ((plain, BODY), (model, {**BODY, "tools": [TOOL]}))
    ]
    token_ids = model.tokenizer.encode(ANSWER, add_special_tokens=False)
    tokens = Tokens(token_ids)
    rows = []
    for _ in range(args.rounds):
        pair = [asyncio.run(seconds(model, tokens, each, args.streams)) for each in asked]
        rows.append([1e6 * each / (args.streams * len(token_ids)) for each in pair])
    differences = [with_calls - without for without, with_calls in rows]
    return {
        "tokens": len(token_ids),
        "plain_us": statistics.median(row[0] for row in rows),
        "read_us": statistics.median(row[1] for row in rows),
        "ratio": statistics.median(with_calls / without for without, with_calls in rows),
        "share": statistics.median(differences) * 1e-6 * args.tokens_per_second,
    }


def markdown(report: Report) -> str:
    """One row."""
    columns = (
        ("streams", "streams"), ("a token without tools, µs", "plain_us", ".1f"),
        ("with reasoning and a call, µs", "read_us", ".1f"), ("ratio", "ratio", ".2f"),
        ("share of served time", lambda row: f"{row['share']:.2%} at {row['tokens_per_second']} tokens/s"),
    )  # fmt: skip
    return f"{told(report)}\n\n{columns_table(columns, [report])}"


EXPERIMENT = Experiment(
    "perf.serving.parsing", __doc__,
    options=(
        engine_place(), number("--streams", 64, "answers at once (default %(default)s)"),
        number("--rounds", 7, "pairs (default %(default)s)"),
        number("--tokens-per-second", 1000, "of all streams (default %(default)s)", metavar="N"),
        output("OUTPUT.json and .md"),
    ),
    measure=make_report, settings=("streams", "tokens_per_second"), is_dated=True, shown=markdown,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
