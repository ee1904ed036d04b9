"""Guides that speak of added tokens: as text they are kept to, letter by letter; one that ends texts is refused."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken

from kvforge.runtime.guides.compiler import GuideCompiler
from kvforge.runtime.guides.grammar import without_forcing
from kvforge.runtime.guides.judge import Judge
from kvforge.runtime.guides.trial import NEEDS_END
from kvforge.runtime.requests.guided_decoding import GuidedDecoding
from kvforge.runtime.text.tokenizer import Tokenizer
from tests.support.models.text_tokenizers import byte_level

pytest.importorskip("llguidance")
EOS = 2
"""`</s>`, which is special; `<think>` is an added token that is none, as Qwen3's."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = byte_level()
    found.backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return found


@pytest.fixture(scope="module")
def judge(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str())
    judge = Judge(folder, [EOS])
    yield judge
    judge.close()


def generated(tokenizer: Tokenizer, judge: Judge, guided: GuidedDecoding, seed: int) -> str:
    """A text of the guide, of tokens drawn among those that may follow."""
    vocab_size = tokenizer.backend.get_vocab_size()
    compiler = GuideCompiler(tokenizer, [EOS], vocab_size)
    guide = compiler.compile(guided, judge.submit(guided).result(timeout=120)).start()
    rng, tokens = random.Random(seed), list[int]()
    while len(tokens) < 100:
        forbidden, may_end = guide.next_tokens()
        allowed = np.flatnonzero(~forbidden.numpy())
        if may_end and (not len(allowed) or rng.random() < 0.5):
            break
        tokens.append(int(rng.choice(allowed)))
        guide.accept(tokens[-1])
    return tokenizer.backend.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("kind", "guide", "texts"),
    [
        ("regex", "<think>", {"<think>"}),
        ("regex", "a</s>b", {"a</s>b"}),
        ("regex", "a[<]think>", {"a<think>"}),
        ("regex", "(yes|<think>|</s>!)", {"yes", "<think>", "</s>!"}),
        ("json_schema", '{"const": "<think>"}', {'"<think>"'}),
        ("json_schema", '{"enum": ["\\u003cthink>", 5]}', {'"<think>"', "5"}),
        ("ebnf_grammar", 'start: "<think>" /[ab]/', {"<think>a", "<think>b"}),
        ("ebnf_grammar", 'root ::= "</s>" "x"', {"</s>x"}),
        ("ebnf_grammar", 'start: "a" <think> "b"', {"a<think>b"}),
        ("structural_tag", '{"triggers": ["<f"], "structures": [{"begin": "<f>", "end": "<think>"}]}', None),
    ],
)  # fmt: skip
def test_a_text_that_is_an_added_token(tokenizer, judge, kind: str, guide: str, texts: set | None, seed: int) -> None:
    found = generated(tokenizer, judge, GuidedDecoding(kind, guide), seed)
    assert texts is None or found in texts


def test_other_guides_are_tokenized_ahead(judge: Judge) -> None:
    """Which gives the model the tokens that it was trained on."""
    for guided in (GuidedDecoding("regex", "think"), GuidedDecoding("json_schema", '{"const": "think"}')):
        grammar = judge.submit(guided).result(timeout=120).grammar
        assert grammar and grammar != without_forcing(grammar) and "no_forcing" not in grammar


@pytest.mark.parametrize(
    "grammar", ['start: "a" </s>', "start: </s>", 'start: "a" <[2]> "b"', 'start: "a" </s> | </s>']
)
def test_a_guide_that_obliges_an_end_is_refused(judge: Judge, grammar: str) -> None:
    found = judge.submit(GuidedDecoding("ebnf_grammar", grammar)).result(timeout=120)
    assert str(found.refusal) == f"guided_decoding cannot be used: {NEEDS_END}."


def test_a_guide_that_allows_an_end_is_served(tokenizer: Tokenizer, judge: Judge) -> None:
    found = {
        generated(tokenizer, judge, GuidedDecoding("ebnf_grammar", 'start: "a" (</s> | "b")'), s) for s in range(5)
    }
    assert found == {"ab"}
