"""Guides made to cost a server its time, memory or life; run as a program, it offers each to an engine.

Every line it prints is [name, seconds to judge, "accepted" or the refusal, seconds of the slowest step after].
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from kvforge.runtime.requests.guided_decoding import MAX_GUIDE_BYTES, GuidedDecoding


def _nested(opening: str, inner: str, closing: str, length: int = MAX_GUIDE_BYTES) -> str:
    depth = (length - len(inner) - 100) // len(opening + closing)
    return opening * depth + inner + closing * depth


def _definitions(step: dict, last: dict, count: int) -> str:
    text = {f"d{i}": json.loads(json.dumps(step).replace("NEXT", f"#/$defs/d{i + 1}")) for i in range(count)}
    return json.dumps({"$defs": {**text, f"d{count}": last}, "$ref": "#/$defs/d0"})


def _chain(rule: str, last: str, names: str, count: int) -> str:
    rules = [rule.replace("THIS", f"{names}{i}").replace("NEXT", f"{names}{i + 1}") for i in range(count)]
    return "\n".join([*rules, last.replace("THIS", f"{names}{count}")])


def hostile_guides() -> Iterator[tuple[str, str, str]]:
    """(name, kind, guide)."""
    reference = {"$ref": "NEXT"}
    for count in (499, 1500):
        yield f"references {count}", "json_schema", _definitions(reference, {"type": "integer"}, count)
        array = {"type": "array", "items": reference}
        yield f"arrays {count}", "json_schema", _definitions(array, {"type": "integer"}, count)
    both = {"anyOf": [reference, reference]}
    yield "doubling anyOf", "json_schema", _definitions(both, {"type": "integer"}, 60)
    yield "doubling allOf", "json_schema", _definitions({"allOf": [reference, reference]}, {"type": "integer"}, 60)
    yield "self", "json_schema", '{"$ref": "#"}'
    yield "network", "json_schema", '{"$ref": "http://127.0.0.1:1/x.json"}'
    yield "file", "json_schema", '{"$ref": "file:///etc/passwd"}'
    yield "nested schema", "json_schema", _nested('{"items":', "{}", "}")
    yield "large multipleOf", "json_schema", '{"type": "integer", "multipleOf": 999983}'
    yield "two multipleOf", "json_schema", '{"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}], "type": "integer"}'
    yield "fine multipleOf", "json_schema", '{"type": "number", "multipleOf": 1e-300}'
    yield "exact multipleOf", "json_schema", '{"type": "integer", "multipleOf": 1e400}'
    yield "properties", "json_schema", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(2200)}})
    yield "values", "json_schema", json.dumps({"enum": [f"v{i}" for i in range(5000)]})
    yield "long value", "json_schema", json.dumps({"const": "x" * (MAX_GUIDE_BYTES - 100)})
    yield "many items", "json_schema", '{"type": "array", "minItems": 1000000000, "items": {}}'
    yield "many characters", "json_schema", '{"type": "string", "minLength": 1000000000}'
    yield "nested groups", "regex", _nested("(", "a", ")")
    yield "nested counts", "regex", "((a{1,1000}){1,1000}){1,1000}"
    yield "wide state", "regex", "(.*a.{20}|.*b.{21}|.*c.{23}){3}"
    yield "long literal", "regex", "x" * (MAX_GUIDE_BYTES - 100)
    yield "many words", "regex", "|".join(f"w{i}" for i in range(9000))
    for count in (998, 3500):
        yield f"rules {count}", "ebnf_grammar", "start: r0\n" + _chain("THIS: NEXT", 'THIS: "a"', "r", count)
        yield f"terminals {count}", "ebnf_grammar", "start: R0\n" + _chain('THIS: NEXT "x"', 'THIS: "a"', "R", count)
    for count in (498, 2500):
        yield f"gbnf {count}", "ebnf_grammar", "root ::= r0\n" + _chain('THIS ::= NEXT "x"', 'THIS ::= "a"', "r", count)
    yield "nested lark", "ebnf_grammar", "start: " + _nested("(", '"a"', ")")
    yield "nested gbnf", "ebnf_grammar", "root ::= " + _nested("(", '"a"', ")")
    yield "repetition", "ebnf_grammar", 'start: ("a"{1000}){1000}'
    yield "ambiguity", "ebnf_grammar", 'start: start start | "a" |'
    yield "negation", "ebnf_grammar", "start: A\nA: " + _nested("~(", '"a"', ")")
    yield "long text", "ebnf_grammar", 'root ::= "' + "x" * (MAX_GUIDE_BYTES - 100) + '"'
    yield "embedded", "ebnf_grammar", 'start: %json {"type": "integer", "multipleOf": 999983}'
    yield "embedded spelt", "ebnf_grammar", 'start: %json{"type": "integer", "multiple\\u004ff": 999983}'
    yield "embedded late", "ebnf_grammar", 'start: "%json" | %json {"const": "%json"} | %json {"multipleOf": 999983}'
    for count in (399, 1500):
        schema = _definitions(reference, {"type": "integer"}, count)
        yield (
            f"embedded references {count}",
            "ebnf_grammar",
            "start: r0\n" + _chain("THIS: NEXT", "THIS: %json " + schema, "r", 198),
        )
    texts = {f"p{i}": {"type": "string"} for i in range(900)}
    yield "embedded colons", "ebnf_grammar", "start: %json " + json.dumps({"properties": texts})
    around: dict[str, Any] = {"opens": [5], "closes": [6], "kind": "json"}
    yield "reasoning", "after_reasoning", json.dumps(around)
    yield "reasoning of many marks", "after_reasoning", json.dumps({**around, "closes": [6] * 20_000})
    yield "reasoning without text", "after_reasoning", json.dumps({**around, "then": ['"\\\n'] * 9000})
    yield "reasoning of a budget", "after_reasoning", json.dumps({**around, "budget": 2**31 - 1, "repeats": True})
    within = {**around, "kind": "ebnf_grammar", "guide": 'start: "a" | "}" }\nb: "'}
    yield "reasoning and braces", "after_reasoning", json.dumps(within)
    deep = {**around, "kind": "ebnf_grammar", "guide": "start: " + _nested("(", '"a"', ")")}
    yield "reasoning nested", "after_reasoning", json.dumps(deep)
    yield "reasoning in reasoning", "after_reasoning", json.dumps({**around, "kind": "after_reasoning"})
    yield "tags", "structural_tag", json.dumps({"triggers": ["<"], "structures": [{"begin": "<a", "end": ""}] * 1000})


def main() -> int:
    """Offer every guide to one engine, as a request of a few tokens."""
    from kvforge.common.errors import RequestError
    from kvforge.runtime import LLMEngine, SamplingParams
    from tests.support.models.text_tokenizers import byte_level
    from tests.support.sessions.fake import FakeSession

    engine = LLMEngine(session=FakeSession(vocab_size=340), tokenizer=byte_level(), num_pages=40)
    for name, kind, guide in hostile_guides():
        start, slowest, result = time.monotonic(), 0.0, "accepted"
        try:
            params = SamplingParams(max_tokens=10, seed=0, guided_decoding=GuidedDecoding(kind, guide))
            engine.add_request(name, [5], params)
        except RequestError as error:
            result = str(error)
        judged = time.monotonic() - start
        while engine.has_unfinished():
            start = time.monotonic()
            outputs = engine.step()
            slowest = max(slowest, time.monotonic() - start)
            assert all(output.finish_reason in (None, "stop", "length", "error") for output in outputs)
        engine.check_invariants()
        print(json.dumps([name, judged, result, slowest]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
