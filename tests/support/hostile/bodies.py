"""Bodies of requests that are made to cost the server more than their sender."""

import json
from collections.abc import Callable

MODEL = "tiny"


def _completion(size: int, **fields: object) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "x", **fields}).encode()


def _raw(field: str, value: bytes) -> bytes:
    return b'{"model": "%b", "prompt": "x", "%b": %b}' % (MODEL.encode(), field.encode(), value)


def _chat(messages: list) -> bytes:
    return json.dumps({"model": MODEL, "messages": messages}).encode()


COMPLETIONS: dict[str, Callable[[int], bytes]] = {
    "a long text": lambda size: _completion(size, prompt="a b" * (size // 3)),
    "a text of one word": lambda size: _completion(size, prompt="a" * size),
    "escapes": lambda size: _raw("prompt", b'"' + b"\\u00e9" * (size // 6) + b'"'),
    "half characters": lambda size: _raw("prompt", b'"' + b"\\ud83d\\ude00" * (size // 12) + b'\\ud800"'),
    "ids": lambda size: _raw("prompt", b"[" + b"5," * (size // 2) + b"5]"),
    "ids that are none": lambda size: _raw("prompt", b"[" + b"5," * (size // 2) + b'"a"]'),
    "many prompts": lambda size: _completion(size, prompt=["a " * (size // 256)] * 128),
    "too many prompts": lambda size: _raw("prompt", b"[" + b'"a",' * (size // 4) + b'"a"]'),
    "deep lists": lambda size: _raw("prompt", b"[" * (size // 2) + b"]" * (size // 2)),
    "deep objects": lambda size: _raw("user", b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6)),
    "empty lists": lambda size: _raw("metadata", b"[" + b"[]," * (size // 3) + b"[]]"),
    "empty objects": lambda size: _raw("metadata", b"[" + b"{}," * (size // 3) + b"{}]"),
    "keys": lambda size: _raw("metadata", json.dumps({str(i): i for i in range(size // 16)}).encode()),
    "fields": lambda size: b'{"x":1,' * 1 + b",".join(b'"f%d":1' % i for i in range(size // 10)) + b"}",
    "one key again and again": lambda size: b"{" + b'"user":1,' * (size // 9) + b'"user":1}',
    "a long integer": lambda size: _raw("seed", b"9" * size),
    "long integers": lambda size: _raw("prompt", b"[" + b",".join([b"9" * 4000] * (size // 4001)) + b"]"),
    "a long fraction": lambda size: _raw("temperature", b"0." + b"9" * size),
    "long fractions": lambda size: _raw("metadata", b"[" + b",".join([b"0." + b"7" * 700] * (size // 703)) + b"]"),
    "infinite": lambda size: _raw("temperature", b"1e400"),
    "exponents": lambda size: _raw("metadata", b"[" + b"1e400," * (size // 6) + b"1]"),
    "stop tokens": lambda size: _raw("stop_token_ids", b"[" + b"5," * (size // 2) + b"5]"),
    "stop strings": lambda size: _raw("stop", b"[" + b'"a",' * (size // 4) + b'"a"]'),
    "one stop string": lambda size: _completion(size, stop="a" * size),
    "bias": lambda size: _raw("logit_bias", json.dumps({str(i): 1 for i in range(size // 10)}).encode()),
    "a long name": lambda size: b'{"model": "' + b"m" * size + b'"}',
    "choices": lambda size: _completion(size, guided_choice=["("] * (size // 5)),
    "a long schema": lambda size: _completion(size, guided_json={str(i): {} for i in range(size // 12)}),
    "spaces": lambda size: b" " * size + _completion(size),
    "not closed": lambda size: b'{"model": "' + b"\\" * size,
    "not UTF-8": lambda size: b'{"model": "' + b"a" * size + b'\xff"}',
}
CHATS: dict[str, Callable[[int], bytes]] = {
    "messages": lambda size: _chat([{"role": "user", "content": "a"}] * (size // 34)),
    "parts": lambda size: _chat([{"role": "user", "content": [{"type": "text", "text": "a"}] * (size // 30)}]),
    "one long message": lambda size: _chat([{"role": "user", "content": "a b " * (size // 4)}]),
    "messages that are none": lambda size: _chat([1] * (size // 3)),
    "deep content": lambda size: b'{"model":"tiny","messages":' + b"[" * (size // 2) + b"]" * (size // 2) + b"}",
}
