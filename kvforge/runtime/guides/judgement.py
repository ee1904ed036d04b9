"""Judges one guide in the process that calls it, which a crash or a hang then ends; ``Judge`` asks a worker for it."""

from collections.abc import Callable, Collection
from typing import Any

from kvforge.common.errors import RequestError
from kvforge.runtime.guides.grammar import grammar_of, is_unforced, names_one_of, without_forcing
from kvforge.runtime.guides.limits import MAX_TRIAL_STEP_S, tiers
from kvforge.runtime.guides.matchers import make_matcher
from kvforge.runtime.guides.messages import message_of, without_place
from kvforge.runtime.guides.trial import try_out
from kvforge.runtime.guides.verdict import Verdict
from kvforge.runtime.requests.guided_decoding import AFTER_REASONING, GuidedDecoding, guide_error
from kvforge.runtime.requests.reasoning import parts_of


def judged(
    guided: GuidedDecoding, vocabulary: Any, is_special: Callable[[str], bool], no_text: Collection[str] = ()
) -> Verdict:
    """The verdict on a guide for an ``LLTokenizer``; ``is_special`` tells whether a text is one special token, and
    ``no_text`` are the tokens that llguidance does not take for the text that they are written with.

    The narrow limits do where no walk runs into them, and where wider ones let nothing more pass quickly: such a guide
    may give up in the midst of a text. What follows reasoning is judged by itself, as walks would seldom come to it.
    """
    try:
        if guided.kind == AFTER_REASONING:
            inner = judged(parts_of(guided)[1], vocabulary, is_special, no_text)
            return _behind_reasoning(inner, _grammar(guided, is_special), vocabulary)
        grammar = _grammar(guided, is_special)
    except RequestError as error:
        return Verdict(refusal=error.refusal)
    narrow, wide = tiers(guided.kind)
    is_forced = not names_one_of(guided, no_text)
    grammar = grammar if is_forced else without_forcing(grammar)
    trial = try_out(make_matcher(vocabulary, grammar, narrow), vocabulary)
    if trial.contradicts and is_forced:
        grammar = without_forcing(grammar)
        trial = try_out(make_matcher(vocabulary, grammar, narrow), vocabulary)
    if trial.problem is not None or trial.gave_up:
        wider = try_out(make_matcher(vocabulary, grammar, wide), vocabulary)
        if wider.problem is None and not wider.gave_up and wider.slowest_s < MAX_TRIAL_STEP_S / 2:
            return Verdict(grammar, wide)
    problem = trial.problem
    if problem is None and trial.slowest_s > MAX_TRIAL_STEP_S:
        problem = f"a token takes {trial.slowest_s * 1000:.0f} ms of processor time, make it less ambiguous"
    if problem is not None:
        said = problem if guided.kind == "ebnf_grammar" else without_place(problem)
        return Verdict(refusal=guide_error(f"cannot be used: {said}").refusal)
    return Verdict(grammar, narrow)


def _behind_reasoning(inner: Verdict, grammar: str, vocabulary: Any) -> Verdict:
    """The verdict on a grammar of reasoning, which is quick at each token, and of what follows it, whose verdict is
    ``inner``."""
    grammar_of_inner, limits = inner.accepted()
    grammar = without_forcing(grammar) if is_unforced(grammar_of_inner) else grammar
    matcher = make_matcher(vocabulary, grammar, limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return Verdict(refusal=guide_error(f"cannot be used: {without_place(message_of(matcher))}").refusal)
    return Verdict(grammar, limits)


def _grammar(guided: GuidedDecoding, is_special: Callable[[str], bool]) -> str:
    try:
        return grammar_of(guided, is_special)
    except RequestError:
        raise
    except Exception as error:  # llguidance's converters raise nothing more precise
        words = " ".join(str(error).split()).rstrip(".")[:300]
        raise guide_error(f"cannot be used: {words}") from None
