"""Requests to the OpenAI gateway from a seed: good ones, whose answer is known, and broken ones."""

import json
import random
from typing import Any

from tests.support.fuzz.bytes import break_body
from tests.support.fuzz.cases import MOST_TOKENS
from tests.support.hostile.neighbours.guides import random_guide
from tests.support.serving.gateway_process import MODEL

FIELDS = [
    "n", "temperature", "top_p", "top_k", "min_p", "min_tokens", "presence_penalty", "frequency_penalty", "seed",
    "repetition_penalty", "stop", "stop_token_ids", "logit_bias", "response_format", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "structured_outputs", "logprobs", "top_logprobs", "stream", "stream_options",
    "ignore_eos", "echo", "best_of", "prompt", "messages", "model", "max_tokens", "max_completion_tokens", "suffix",
    "tools", "tool_choice", "user", "system", "stop_sequences", "thinking", "output_config",
    "add_special_tokens", "no_such_field", "__class__", "chat_template",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**31, -(2**63), 2**70, 0.5, -0.5, 1e308, float("nan"), float("inf"), "", "a",
    "\u0000", "\ud800", "x" * 5000, [], [1], ["a"], [""], [[1, 2]], [-1], [2**40], [None], {}, {"a": 1}, {"5": 1.0},
    {"5": 1e9}, {"x": "y"}, {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "zap"}}},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, "(", "(a+)+$", "[" * 300, "\u202e",
]  # fmt: skip


def good_body(prompt: str, max_tokens: int) -> dict[str, Any]:
    """A greedy completion."""
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}


def broken_body(rng: random.Random, good: dict[str, Any]) -> tuple[str, bytes]:
    """(path, body) of a request with something wrong, or at least odd, in it."""
    body, path = dict(good), "completions"
    if rng.random() < 0.4:
        path = "chat/completions"
        body["messages"] = rng.choice(
            [[{"role": "user", "content": body.pop("prompt")}], [], [{}], [{"role": "evil", "content": 1}], "text",
             [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
             [{"role": "user", "content": "{{ cycler.__init__.__globals__ }}"}] * rng.choice([1, 50])]
        )  # fmt: skip
        if rng.random() < 0.4:
            path = "messages"
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        body[rng.choice(FIELDS)] = rng.choice(VALUES)
    if rng.random() < 0.1:
        body.update(random_guide(rng.randrange(2**32)))
    if rng.random() < 0.2 and body:
        del body[rng.choice(list(body))]
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if isinstance(body.get(name), (int, float)) and body[name] > MOST_TOKENS:
            body[name] = MOST_TOKENS
    if "max_tokens" not in body:
        body["max_tokens"] = MOST_TOKENS
    data = json.dumps(body).encode()
    return path, break_body(rng, data) if rng.random() < 0.3 else data
