"""Log-likelihoods of an engine in lm-evaluation-harness, against transformers."""

import random
from pathlib import Path

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.compiler import BuildOptions, build_engine
from kvforge.tasks.prompt import make_example
from tests.support.models.engines import PLAIN
from tests.support.models.shelf import EngineShelf

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is an extra")
from kvforge.evaluation.lm_harness import EngineLM
from tests.support.lm_harness import TEXTS, Reference, byte_ids, instance, loglikelihoods

ROOT = Path(__file__).resolve().parents[4]
LONGEST = 16
"""Bytes of the longest continuation of TEXTS or an answer."""


def test_loglikelihoods_are_those_of_transformers(model: EngineLM, reference: Reference) -> None:
    pairs = [(a, b) for a in TEXTS for b in TEXTS]
    greedy = reference.greedy(byte_ids(TEXTS[0]), 1)[0] - 3
    pairs += [(TEXTS[0], chr(greedy)), ("ends with a space ", "x"), ("", "no context"), ("  ", "x")]
    expected = [reference.score(byte_ids(a) or [1], byte_ids(b)) for a, b in pairs[:-3]]
    expected.append(reference.score(byte_ids("ends with a space"), byte_ids(" x")))
    expected.append(reference.score([1], byte_ids("no context")))
    expected.append(reference.score([1], byte_ids("  x")))
    found = loglikelihoods(model, pairs)
    rounding = reference.rounding(LONGEST)
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], abs=rounding)
    assert [top for _, top in found] == [top for _, top in expected]
    assert greedy >= 128 or found[-4][1], "a greedy continuation is found greedy"


def test_contexts_are_cut_from_the_left_and_continuations_are_not(
    engines: EngineShelf, reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    model = EngineLM(engines.engine(PLAIN), max_length=20)
    context, continuation = "a" * 8 + "0123456789" * 3, "xyz"
    ((total, _),) = loglikelihoods(model, [(context, continuation)])
    expected, _ = reference.score(byte_ids(context)[-17:], byte_ids(continuation))
    assert total == pytest.approx(expected, abs=reference.rounding(20))
    assert "1 of 1 contexts exceed 20 tokens" in caplog.text
    with pytest.raises(KvforgeError, match="a continuation of 20 tokens leaves no context within the engine's 20"):
        loglikelihoods(model, [("a", "b" * 20)])
    request = instance("generate_until", context, {"until": [], "max_gen_toks": 4})
    (text,) = model.generate_until([request], disable_tqdm=True)
    ids = reference.greedy(byte_ids(context)[-16:], 4)
    assert text == model.tokens.decode(ids[: ids.index(2)] if 2 in ids else ids)


def test_an_answer_that_its_context_swallows_is_refused(model: EngineLM) -> None:
    """A tokenizer may merge the two into no more tokens than the context has; no tokens would be the best answer."""
    with pytest.raises(KvforgeError, match="leaves the answer 'b' no token of its own"):
        model._loglikelihood_tokens([(("a", "b"), [5], [])], disable_tqdm=True)


@pytest.mark.parametrize("length", [5, 19, 20, 50])
def test_rolling_windows_score_every_token_once(engines: EngineShelf, reference: Reference, length: int) -> None:
    model = EngineLM(engines.engine(PLAIN), max_length=20)
    ids = byte_ids(("lorem ipsum dolor sit amet " * 3)[:length])
    text = model.tokens.decode(ids)
    found = model.loglikelihood_rolling([instance("loglikelihood_rolling", text)] * 2, disable_tqdm=True)
    expected = reference.score([1], ids[:19])[0]
    for end in range(38, length + 19, 19):  # further windows: 20 tokens, of which the last ones are not scored yet
        end = min(end, length)
        done = (end - 1) // 19 * 19
        expected += reference.score(ids[max(end - 20, 0) : done], ids[done:end])[0] if end > done else 0
    assert found == pytest.approx([expected] * 2, abs=reference.rounding(length))
    assert model.loglikelihood_rolling([instance("loglikelihood_rolling", "")], disable_tqdm=True) == [0]


def test_the_tiny_teacher_answers_as_in_transformers(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """On prompts that it was trained for, in float32."""
    if not request.config.getoption("--full"):
        pytest.skip("builds an engine; --full")
    checkpoint = ROOT / "model_defs/assets/tiny-teacher"
    build_engine(checkpoint, tmp_path / "engine", BuildOptions(dtype="float32"))
    model, reference = EngineLM(tmp_path / "engine"), Reference(checkpoint)
    examples = [
        make_example(task, 300, lambda text: len(model.tok_encode(text)), random.Random(f"{task}{i}"))
        for task in ("needle_single", "variables", "list_recall", "arithmetic")
        for i in range(4)
    ]
    pairs = [(e.prompt, answer) for e in examples for answer in (f" {e.answer}.", " 123.")]
    expected = [reference.score(*model._encode_pair(*pair)) for pair in pairs]
    found = loglikelihoods(model, pairs)
    rounding = reference.rounding(LONGEST)
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], abs=rounding)
    assert [top for _, top in found] == [top for _, top in expected] and 0 < sum(top for _, top in found) < len(found)
