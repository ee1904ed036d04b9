"""Guides in the words of llguidance: what each kind takes, and what is too costly to take.

llguidance bounds most of what a guide can cost (``LLParserLimits``). Two things it does not bound are refused
here: rules and references that can form chains deeper than its stack, and large ``multipleOf``, whose automaton
has a state for every remainder.
"""

import json
import math
from collections.abc import Callable, Collection, Iterator
from fractions import Fraction
from typing import Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from kvforge.runtime.guides.reasoning_grammar import grammar_behind
from kvforge.runtime.requests.guided_decoding import AFTER_REASONING, GuidedDecoding, guide_error
from kvforge.runtime.requests.reasoning import parts_of

MAX_RULES = 1000
MAX_REFERENCES = 500
MAX_REMAINDERS = 10_000
_EMBEDDED = "%json"
_UNFORCED = "unforced"
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_WHITESPACE = r" |\r?\n[ \t]{0,32}"
"""Between JSON's tokens: a space, or a line's end and an indentation. A model in doubt would fill pages with more."""


def grammar_of(guided: GuidedDecoding, is_special: Callable[[str], bool]) -> str:
    """Return the guide as llguidance's grammar; ``is_special`` tells whether a text is one special token.

    Raises:
        RequestError: the guide is not JSON where it must be, or too costly. What else is wrong with a grammar
            shows when a matcher is made of it.
    """
    guide = guided.guide or ""
    if guided.kind == "json":
        return _json_grammar({"type": "object"})
    if guided.kind == "json_schema":
        schema = _parsed(guided.kind, guide)
        _check_schema(schema)
        return _json_grammar(schema)
    if guided.kind == "regex":
        return LLMatcher.grammar_from_regex(guide)
    if guided.kind == "ebnf_grammar":
        _check_rules(guide)
        try:
            return LLMatcher.grammar_from_lark(any_to_lark(guide))
        except RecursionError:
            raise guide_error("cannot be used: the ebnf_grammar is nested too deeply", "flatten it") from None
    if guided.kind == AFTER_REASONING:
        reasoning, inner = parts_of(guided)
        return LLMatcher.grammar_from_lark(grammar_behind(reasoning, grammar_of(inner, is_special)))
    return _tag_grammar(_parsed(guided.kind, guide), is_special)


def names_one_of(guided: GuidedDecoding, tokens: Collection[str]) -> bool:
    """Whether a guide speaks of one of these texts, whatever escapes it writes them with."""
    text = guided.guide or ""
    if guided.kind in ("json_schema", "structural_tag"):
        text = json.dumps(json.loads(text), ensure_ascii=False)
    text = text.replace("\\", "")
    return any(token in text for token in tokens)


def without_forcing(grammar: str) -> str:
    """Return a grammar of the same texts of which llguidance tokenizes no part ahead.

    Where only one text can follow, llguidance allows the tokens that the tokenizer makes of it. Those of a text that is
    an added token are that token, which its parser then refuses, as the token is no text.
    """
    inner = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    root = {"name": _UNFORCED, "lark_grammar": '%llguidance {"no_forcing": true}\nstart: @guide\n'}
    return json.dumps({"grammars": [root, {**inner[0], "name": "guide"}]})


def is_unforced(grammar: str) -> bool:
    """Whether a grammar is one of ``without_forcing``."""
    return grammar.startswith("{") and json.loads(grammar)["grammars"][0].get("name") == _UNFORCED


def _json_grammar(schema: Any) -> str:
    if schema is False:
        raise guide_error("cannot be used: the schema false allows no text", "give another")
    schema = {} if schema is True else schema
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": _WHITESPACE})


def _parsed(kind: str, guide: str) -> Any:
    try:
        return json.loads(guide)
    except RecursionError:
        raise guide_error("is nested too deeply", "flatten it") from None
    except ValueError as error:
        raise guide_error(f"is not JSON ({error})", "correct it") from None


def _tag_grammar(tag: Any, is_special: Callable[[str], bool]) -> str:
    """The grammar of {"triggers": [text], "structures": [{"begin": text, "schema": ..., "end": text}]}."""
    triggers = tag.get("triggers") if isinstance(tag, dict) else None
    structures = tag.get("structures") if isinstance(tag, dict) else None
    if not isinstance(triggers, list) or not isinstance(structures, list) or not structures:
        raise guide_error('cannot be used: a structural_tag is {"triggers": [...], "structures": [...]}', "give both")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise guide_error("cannot be used: the triggers of a structural_tag are texts", "give no others")
    _refuse_others("a structural_tag", tag, ("type", "triggers", "structures"))
    tags = []
    for item in structures:
        if not isinstance(item, dict) or not isinstance(item.get("begin"), str) or not isinstance(item.get("end"), str):
            raise guide_error(
                "cannot be used: a structure of a structural_tag has a begin, a schema and an end", "give all three"
            )
        _refuse_others("a structure of a structural_tag", item, ("begin", "schema", "end"))
        schema = item.get("schema", {})
        if not isinstance(schema, dict):
            raise guide_error("cannot be used: the schema in a structural_tag is no JSON object", "give a JSON schema")
        trigger = next((trigger for trigger in triggers if item["begin"].startswith(trigger)), None)
        if trigger is None:
            raise guide_error(f"cannot be used: no trigger begins {item['begin']!r}", "give one in triggers")
        tags.append(StructTag(trigger=trigger, begin=item["begin"], grammar=schema, end=item["end"]))
    _check_schema([tag.grammar for tag in tags])
    bracketed = {tag.trigger for tag in tags if tag.trigger.startswith("<") and tag.trigger.endswith(">")}
    special = {trigger for trigger in bracketed if is_special(trigger)}
    if special and special != bracketed:
        raise guide_error(
            f"cannot be used: {min(bracketed - special)!r} is no special token as other triggers are", "change it"
        )
    return StructTag.to_grammar(tags, assume_special=bool(special))


def _refuse_others(what: str, given: dict[str, Any], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise guide_error(f"cannot be used: {what} has no {name[:80]!r}", f"give {', '.join(known)}")


def _check_schema(schema: Any) -> None:
    references, factors = _num_references(schema), []
    for key, value in _entries(schema):
        if key == "multipleOf" and isinstance(value, (int, float)) and not isinstance(value, bool):
            factors.append(_fraction(value))
    if references > MAX_REFERENCES:
        raise guide_error(f"cannot be used: the schema holds {references} references", f"give at most {MAX_REFERENCES}")
    scale = math.lcm(*(factor.denominator for factor in factors))
    numbers = [abs(int(factor * scale)) for factor in factors]
    if sum(numbers) > MAX_REMAINDERS or math.lcm(*numbers) > MAX_REMAINDERS:
        raise guide_error(
            "cannot be used: multipleOf in the schema is too fine or too large", f"keep it below {MAX_REMAINDERS}"
        )


def _num_references(schema: Any) -> int:
    return sum(key in _REFERENCES and isinstance(value, str) for key, value in _entries(schema))


def _fraction(value: float) -> Fraction:
    if not math.isfinite(value) or abs(value) > MAX_REMAINDERS:
        raise guide_error(f"cannot be used: multipleOf in the schema is {value}", f"keep it below {MAX_REMAINDERS}")
    return Fraction(str(value))


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key and value of nested JSON data."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield from value.items()
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)


def _check_rules(text: str) -> None:
    rules, schemas = _without_schemas(text)
    # A chain may go through rules and through references.
    if rules.count(":") + _num_references(schemas) * MAX_RULES // MAX_REFERENCES > MAX_RULES:
        most = f"{MAX_RULES} rules (or colons; a reference is two)"
        raise guide_error(f"cannot be used: the ebnf_grammar holds more than {most}", "shorten it")
    if _EMBEDDED in rules and any(word in rules for word in ("multipleOf", "Ref", "$ref", "\\u")):
        raise guide_error("cannot be used: %json in the ebnf_grammar is not followed by a JSON object", "give a schema")
    _check_schema(schemas)


def _without_schemas(text: str) -> tuple[str, list[Any]]:
    """A grammar's text without the objects behind its ``%json``, and these. One that no object follows stays."""
    rules, schemas, at = "", [], 0
    while (found := text.find(_EMBEDDED, at)) >= 0:
        begin = found + len(_EMBEDDED)
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        try:
            schema, end = json.JSONDecoder().raw_decode(text, begin)
        except RecursionError:
            raise guide_error(
                "cannot be used: a schema in the ebnf_grammar is nested too deeply", "flatten it"
            ) from None
        except ValueError:
            schema, end = None, begin
        is_schema = isinstance(schema, dict)
        rules += text[at : found if is_schema else begin]
        at = end if is_schema else begin
        schemas += [schema] if is_schema else []
    return rules + text[at:], schemas
