"""Guided texts are of the asked form, whatever the model, the batch and the other parameters are."""

import functools
import json
import math
import random
import re

import pytest
from tokenizers import AddedToken

from kvforge.common.errors import KvforgeError, RequestError
from kvforge.runtime import LLM, LLMEngine, SamplingParams
from kvforge.runtime.guides import compiler as guide_compiler
from kvforge.runtime.guides import matchers
from kvforge.runtime.guides.compiler import GuideCompiler
from kvforge.runtime.requests.guided_decoding import GuidedDecoding
from tests.support.hostile.json_schemas import random_schema
from tests.support.hostile.schema_judge import is_valid
from tests.support.models.engines import SWIFTKV
from tests.support.models.text_tokenizers import byte_fallback, byte_level
from tests.support.sessions.fake import FakeSession

pytest.importorskip("llguidance")
pytestmark = pytest.mark.usefixtures("one_thread")

TOKENIZERS = {"byte-level": byte_level(), "byte fallback": byte_fallback()}
VOCAB_SIZE = 400
"""More than either tokenizer has."""


def make_llm(tokenizer="byte-level", num_pages=1000, **changes):
    session = FakeSession(vocab_size=VOCAB_SIZE, max_seq_len=512, **changes)
    return LLM(session=session, tokenizer=TOKENIZERS[tokenizer], num_pages=num_pages)


def few_blanks(tokenizer):
    """A bias that keeps the texts short."""
    ids = (TOKENIZERS[tokenizer].encode(blank, add_special_tokens=False) for blank in (" ", "\n", "\t", "\r"))
    return {token: -9.0 for encoded in ids for token in encoded if len(encoded) == 1}


def guided(kind, guide=None, **changes):
    values = {"temperature": 0.0, "max_tokens": 400, "guided_decoding": {"kind": kind, "guide": guide}, **changes}
    return SamplingParams(**values)


def run_one(llm, params, prompt=(5, 6)):
    return llm.generate(list(prompt), params, use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_texts_are_what_random_schemas_allow(tokenizer):
    rng = random.Random(7)
    llm, bias = make_llm(tokenizer), few_blanks(tokenizer)
    schemas = [random_schema(rng) for _ in range(40)]
    params = [
        guided("json_schema", schema, temperature=index % 2, seed=index, logit_bias=bias)
        for index, schema in enumerate(schemas)
    ]
    outputs = llm.generate([[5, 6, index] for index in range(len(schemas))], params, use_tqdm=False)
    for schema, output in zip(schemas, outputs, strict=True):
        text = output.outputs[0]
        assert text.finish_reason == "stop", (schema, text)
        assert is_valid(schema, json.loads(text.text), schema), (schema, text.text)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_texts_match_regular_expressions(tokenizer):
    regexes = [r"[a-c]{3,9}ü(日本|x)", r"(\d{1,3}\.){3}\d{1,3}", r"(yes|no|maybe)", r"[^a-z]{2,5}", r"a*b?"]
    llm = make_llm(tokenizer)
    for temperature in (0.0, 1.0):
        params = [guided("regex", regex, temperature=temperature, seed=3) for regex in regexes]
        outputs = llm.generate([[9, 5, i] for i in range(len(params))], params, use_tqdm=False)
        for regex, output in zip(regexes, outputs, strict=True):
            text = output.outputs[0]
            assert text.finish_reason == "stop" and re.fullmatch(regex, text.text), (regex, text)


@pytest.mark.parametrize(
    "guide",
    [
        'root ::= greeting " " name ("!" | "?"){1,2}\ngreeting ::= "hi" | "hello"\nname ::= [A-C]+ [0-9]',
        'start: greeting " " NAME MARK~1..2\ngreeting: "hi" | "hello"\nNAME: /[A-C]+[0-9]/\nMARK: "!" | "?"',
    ],
)
def test_grammars_of_both_dialects(guide):
    text = run_one(make_llm(), guided("ebnf_grammar", guide, temperature=1.0, seed=1))
    assert text.finish_reason == "stop" and re.fullmatch(r"(hi|hello) [A-C]+[0-9][!?]{1,2}", text.text)


def test_any_json_object():
    tight = {b: 12.0 for b in TOKENIZERS["byte-level"].encode('"}:', add_special_tokens=False)}
    text = run_one(make_llm(), guided("json", logit_bias={**few_blanks("byte-level"), **tight}))
    assert text.finish_reason == "stop" and isinstance(json.loads(text.text), dict)


def test_json_cannot_be_filled_up_with_blanks():
    llm = make_llm()
    blanks = {ids[0]: 50.0 for ids in (llm.tokenizer.encode(b, add_special_tokens=False) for b in ("\n", " ", "\t"))}
    schema = {"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 2}
    text = run_one(llm, guided("json_schema", json.dumps(schema), logit_bias=blanks, max_tokens=400)).text
    assert json.loads(text) == [1, 1]
    assert "\n\n" not in text and "  \n" not in text


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("budget", [None, 0, 7])
def test_reasoning_comes_before_a_guided_text(begun, budget):
    """Of any length within the budget, and without it only where the prompt has not begun it."""
    tokenizer = byte_level()
    marks = ("<think>", "</think>")
    tokenizer.backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    begin, end = map(tokenizer.backend.token_to_id, marks)
    llm = LLM(session=FakeSession(vocab_size=VOCAB_SIZE, max_seq_len=512), tokenizer=tokenizer, num_pages=1000)
    guide = {"opens": [begin], "closes": [end], "begun": begun, "budget": budget, "breaks": 2}
    guide |= {"kind": "json_schema", "guide": '{"enum": [{"a": 5}, {"b": "x"}]}'}
    bias = {**few_blanks("byte-level"), begin: 30.0, end: -20.0 if budget else 4.0}
    params = [guided("after_reasoning", guide, temperature=1.0, seed=seed, logit_bias=bias) for seed in range(20)]
    lengths = set()
    for output in llm.generate([[5, 6, index] for index in range(20)], params, use_tqdm=False):
        (text,) = output.outputs
        assert text.finish_reason == "stop" and (text.token_ids[0] == begin) == (not begun)
        length = text.token_ids.index(end) - (not begun)
        assert length <= (math.inf if budget is None else budget)
        lengths.add(length)
        answer = text.token_ids[text.token_ids.index(end) + 1 :]
        assert json.loads(tokenizer.backend.decode(answer)) in ({"a": 5}, {"b": "x"}) and end not in answer
    assert lengths == {0} if budget == 0 else max(lengths) == (budget or max(lengths)) > 3


def test_structural_tags_bind_only_what_follows_a_trigger():
    tag = {
        "type": "structural_tag",
        "triggers": ["<f="],
        "structures": [{"begin": "<f=add>", "schema": {"enum": [[1], [2]]}, "end": "</f>"}],
    }
    tokenizer = TOKENIZERS["byte-level"]
    start = [tokenizer.encode(c, add_special_tokens=False)[0] for c in "<f="]
    params = guided("structural_tag", tag, max_tokens=80, logit_bias={**few_blanks("byte-level"), start[0]: 5.0})
    text = run_one(make_llm(), params).text
    for found in re.findall("<f=(.*)", text, re.DOTALL)[:1]:
        assert re.match(r"add>\s*\[\s*[12]\s*\]\s*</f>", found), text
    free = run_one(make_llm(), guided("structural_tag", tag, max_tokens=30, logit_bias={start[0]: -90.0}))
    assert "<f=" not in free.text and len(free.token_ids) > 0


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_tokens_do_not_depend_on_the_batch_or_on_preemption(tokenizer):
    rng = random.Random(3)
    bias = few_blanks(tokenizer)
    params, prompts = [], []
    for index in range(10):
        extra = {"n": 1 + index % 3, "temperature": index % 2, "seed": index, "repetition_penalty": 1.1, "logprobs": 1}
        params.append(guided("json_schema", random_schema(rng), logit_bias=bias, max_tokens=70, **extra))
        prompts.append([5, 6, index])
    params.append(SamplingParams(temperature=1.0, seed=5, max_tokens=60))
    prompts.append([8, 9])
    roomy = make_llm(tokenizer)
    alone = [roomy.generate([p], q, use_tqdm=False)[0] for p, q in zip(prompts, params, strict=True)]
    tight = make_llm(tokenizer, num_pages=20)
    together = tight.generate(prompts, params, use_tqdm=False)
    tight.engine.check_invariants()
    assert tight.engine.stats()["num_preemptions"] > 0
    for one, other in zip(alone, together, strict=True):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]
        assert [o.text for o in one.outputs] == [o.text for o in other.outputs]


def test_drafts_change_no_token():
    llm = make_llm(max_draft_len=4)
    plain = guided("regex", "(ab|ba|[0-9]){12}", temperature=1.0, seed=4)
    expected = run_one(llm, plain)
    for draft in (expected.token_ids[:4], [*expected.token_ids[:2], 390], [2, 2]):
        params = guided("regex", "(ab|ba|[0-9]){12}", temperature=1.0, seed=4, draft_token_ids=draft)
        assert run_one(llm, params).token_ids == expected.token_ids


def test_a_complete_text_ends_whatever_speaks_against_it():
    eos = 2
    for changes in (
        {"ignore_eos": True},
        {"min_tokens": 50},
        {"bad_words_ids": [[eos]]},
        {"logit_bias": {eos: -float("inf")}},
        {"ignore_eos": True, "min_tokens": 50, "bad_words_ids": [[eos]], "stop_token_ids": [7]},
        {"frequency_penalty": 100.0, "ignore_eos": True},
    ):
        for temperature in (0.0, 1.0):
            text = run_one(make_llm(), guided("regex", "(ab){3}", temperature=temperature, seed=0, **changes))
            assert text.finish_reason == "stop" and text.text == "ababab", (changes, text)


def test_where_the_text_may_end_and_may_go_on():
    a = TOKENIZERS["byte-level"].encode("a", add_special_tokens=False)[0]
    likes_end = {2: 50.0, a: 0.0}
    assert run_one(make_llm(), guided("regex", "a*", logit_bias=likes_end)).text == ""
    text = run_one(make_llm(), guided("regex", "a*", logit_bias=likes_end, min_tokens=7))
    assert (text.text, text.finish_reason) == ("a" * 7, "stop")
    text = run_one(make_llm(), guided("regex", "a{0,9}", logit_bias=likes_end, ignore_eos=True))
    assert (text.text, text.finish_reason) == ("a" * 9, "stop")
    text = run_one(make_llm(), guided("regex", "a{5,}", ignore_eos=True, max_tokens=20))
    assert (text.text, text.finish_reason) == ("a" * 20, "length")
    text = run_one(make_llm(), guided("regex", "a{5,9}", ignore_eos=True, stop_token_ids=[7], logit_bias={7: 50.0}))
    assert (text.text, text.stop_reason) == ("a" * 5, 7), "a stop token ends a text where it may end"
    text = run_one(make_llm(), guided("regex", "a{5,9}", stop=["aaa"]))
    assert (text.text, text.stop_reason) == ("", "aaa")


def test_forbidden_words_stay_forbidden():
    a, b = (TOKENIZERS["byte-level"].encode(c, add_special_tokens=False)[0] for c in "ab")
    text = run_one(make_llm(), guided("regex", "(a|b){6}", bad_words_ids=[[a, a], [b, b]]))
    assert text.text in ("ababab", "bababa")
    llm = make_llm()
    stuck, other = llm.generate(
        [[5], [6]], [guided("regex", "ab", bad_words_ids=[[b]]), guided("regex", "ab")], use_tqdm=False
    )
    assert stuck.outputs[0].finish_reason == "error" and "leave no token" in str(stuck.outputs[0].stop_reason)
    assert other.outputs[0].text == "ab"


def test_a_guide_that_gives_up_ends_its_sequence_alone():
    llm = make_llm()
    broken, other = llm.generate(
        [[5], [6]],
        [guided("ebnf_grammar", 'start: ("a"{1000}){1000}'), guided("regex", "(ab){4}")],
        use_tqdm=False,
    )
    assert broken.outputs[0].finish_reason == "error"
    assert str(broken.outputs[0].stop_reason).startswith("guided_decoding gave up: ")
    assert other.outputs[0].text == "ab" * 4
    llm.engine.check_invariants()


@pytest.mark.parametrize(
    "kind, guide, says",
    [
        ("json_schema", "{", "is not JSON"),
        ("json_schema", '{"type": "foo"}', "Invalid type: foo"),
        ("json_schema", "false", "allows no text"),
        ("json_schema", "[1]", "cannot be used"),
        ("json_schema", '{"type": "integer", "minimum": NaN}', "cannot be used"),
        ("regex", "a(", "error: unclosed group."),
        ("regex", "(?=a)b", 'cannot be used: invalid regex "(?=a)b"'),
        ("ebnf_grammar", "start: a", 'cannot be used: at 1(8): unknown name: "a".'),
        ("ebnf_grammar", "root ::= (", "cannot be used"),
        ("structural_tag", "[]", "give both"),
        ("structural_tag", '{"triggers": ["<"], "structures": [{"begin": "<a"}]}', "give all three"),
        ("structural_tag", '{"triggers": ["<"], "structures": [{"begin": "a", "end": ""}]}', "no trigger begins 'a'"),
        ("structural_tag", '{"triggers": [1], "structures": [{"begin": "a", "end": ""}]}', "triggers of a"),
        ("structural_tag", '{"triggers": ["<"], "structures": [{"begin": "<", "end": "", "schema": 1}]}', "no JSON"),
    ],
)
def test_wrong_guides_are_one_sentence_and_leave_nothing(kind, guide, says):
    engine = make_llm().engine
    with pytest.raises(RequestError) as error:
        engine.add_request("r", [5], guided(kind, guide))
    message = str(error.value)
    assert says in message and message.endswith(".") and not message.endswith("..") and "\n" not in message
    assert not engine.has_unfinished() and engine.stats()["num_waiting"] == 0


def test_what_guided_decoding_needs(monkeypatch):
    with pytest.raises(RequestError, match="needs a tokenizer and this engine has none"):
        LLMEngine(session=FakeSession(), num_pages=40).add_request("r", [5], guided("json"))
    endless = make_llm(eos_token_ids=())
    with pytest.raises(RequestError, match=r"needs an end-of-text token .*; give stop_token_ids"):
        endless.engine.add_request("r", [5], guided("json"))
    text = run_one(endless, guided("regex", "(ab){3}", stop_token_ids=[7]))
    assert (text.text, text.stop_reason) == ("ababab", 7)
    for name in ("llguidance", "kvforge.runtime.guides.matchers"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(RequestError, match=r"install kvforge\[serve\] for llguidance"):
        make_llm().engine.add_request("r", [5], guided("json"))


def test_a_real_model_and_its_own_tokenizer(engines):
    llm = LLM(engines.engine(SWIFTKV), kv_cache_gib=0.01)
    schema = {"type": "array", "items": {"enum": ["x", "yy", 12, None]}, "minItems": 3, "maxItems": 4}
    for temperature in (0.0, 1.0):
        bias = {token: -20.0 for token in llm.tokenizer.encode(" \n\t\r", add_special_tokens=False)}
        params = guided("json_schema", schema, n=3, temperature=temperature, seed=1, logit_bias=bias, max_tokens=60)
        for text in llm.generate("Once", params, use_tqdm=False)[0].outputs:
            values = json.loads(text.text)
            assert text.finish_reason == "stop" and 3 <= len(values) <= 4 and set(values) <= {"x", "yy", 12, None}


def test_a_lexer_that_others_used_up_is_made_anew(monkeypatch):
    """Copies share a lexer of at most so many states: a text that needs few is not ended by others' many."""
    tokenizer = TOKENIZERS["byte-level"]
    compiler = GuideCompiler(tokenizer, (2,), VOCAB_SIZE)
    wide = GuidedDecoding("regex", "(.*a.{12}|.*b.{13}|.*c.{14}|.*d.{15}){3}")
    monkeypatch.setattr(matchers, "make_matcher", functools.partial(matchers.make_matcher, max_lexer_states=400))
    one = compiler.compile(wide)
    modest, greedy = one.start(), one.start()
    letters = [tokenizer.encode(c, add_special_tokens=False)[0] for c in "abcdefghij"]
    modest.accept(letters[4])
    rng = random.Random(0)
    with pytest.raises(KvforgeError, match=r"gave up: .*too many states"):
        for _ in range(5000):
            greedy.next_tokens()
            greedy.accept(rng.choice(letters))
    assert not one.start().is_sound(), "the copies share the lexer's limit"
    forbidden, may_end = modest.next_tokens()
    expected = compiler.compile(wide)
    assert expected.is_sound()
    expected.accept(letters[4])
    assert forbidden.tolist() == expected.next_tokens()[0].tolist() and not may_end


def test_a_limit_of_the_parser_makes_no_matcher_anew(monkeypatch):
    """A step must not wait for a compilation; the parser's limits are each copy's own, and another would meet them."""
    made, make = [], matchers.make_matcher
    monkeypatch.setattr(matchers, "make_matcher", lambda *args: made.append(args) or make(*args))
    tokenizer = TOKENIZERS["byte-level"]
    compiler = GuideCompiler(tokenizer, (2,), VOCAB_SIZE)
    one = compiler.compile(GuidedDecoding("ebnf_grammar", "start: e\ne: e e | e e e | /[a-z ]/")).start()
    letter = tokenizer.encode("a", add_special_tokens=False)[0]
    with pytest.raises(KvforgeError, match="guided_decoding gave up: "):
        for _ in range(200):
            compiler.begin_step()
            one.next_tokens()
            one.accept(letter)
    assert len(made) == 1


def test_what_a_guide_cost_one_request_no_other_pays():
    compiler = GuideCompiler(TOKENIZERS["byte-level"], (2,), VOCAB_SIZE)
    guided_by = GuidedDecoding("regex", "[a-z]+")
    spent = compiler.compile(guided_by)
    spent._budget._credit_s = -1.0
    with pytest.raises(KvforgeError, match="too much processor time"):
        spent.next_tokens()
    assert compiler.compile(guided_by).next_tokens()[0].any()


def test_a_prepared_compiler_does_not_read_the_tokenizer_again(monkeypatch):
    read = []
    known = guide_compiler._vocabulary
    monkeypatch.setattr(guide_compiler, "_vocabulary", lambda *args: read.append(args) or known(*args))
    engine = make_llm().engine
    engine.guides.prepare()
    engine.add_request("a", [5, 6], guided("regex", "a+"))
    assert len(read) == 1


def test_preparing_a_tokenizer_that_guides_cannot_use_says_nothing(monkeypatch):
    def refuse(*args):
        raise RequestError("guided_decoding cannot use this tokenizer")

    monkeypatch.setattr(guide_compiler, "_vocabulary", refuse)
    engine = make_llm().engine
    engine.guides.prepare()
    with pytest.raises(RequestError, match="cannot use this tokenizer"):
        engine.add_request("a", [5, 6], guided("regex", "a+"))
