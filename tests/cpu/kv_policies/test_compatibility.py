"""Which features go together: the whole table, the documentation made from it, and policies made up."""

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import ClassVar

import pytest

from kvforge.common.errors import BuildError
from kvforge.kv_policies import Full, Need, policies
from kvforge.kv_policies import features as m
from kvforge.kv_policies.compatibility import check, compare, needs_table, table
from kvforge.kv_policies.eviction.rules.adakv import AdaKV
from kvforge.kv_policies.eviction.rules.h2o import H2O
from kvforge.kv_policies.eviction.rules.snapkv import SnapKV
from kvforge.kv_policies.features import Support, all_features, feature_of
from kvforge.kv_policies.shadowkv import ShadowKV

DOCS = Path(__file__).resolve().parents[3] / "docs" / "kv-policies.md"
ANSWERS = {
    "SingleInputKV":                                                  "y i n i y y y y y y y y n y y y",
    "AcrossKV":                                                       "  i i i i i i y y y y y i y y y",
    "AdaKV, FastGen, KVzip, PyramidKV, SimLayerKV, SqueezeAttention": "              y n n i n i n n n",
    "Batch-Max, H2O, RoCo":                                           "              y n n i n i n y n",
    "expected attention, Scissorhands, SnapKV, TOVA":                 "              y n n i n i n y n",
    "KeyDiff, recent tokens, StreamingLLM":                           "              y n n i n y n y n",
    "Quest":                                                          "              n n n i n y n n n",
    "ShadowKV":                                                       "              n n n i n i n y n",
    "8-bit cache":                                                    "                y n y y y y y y",
    "4-bit cache":                                                    "                  n y y y y y n",
    "2-bit cache in groups":                                          "                    i i y y n n",
    "pages, shared prefixes":                                         "                      y y y y y",
    "speculation":                                                    "                        y y y y",
    "KV prediction":                                                  "                          y y y",
    "sliding windows":                                                "                            y y",
    "target cuda":                                                    "                              y",
}  # fmt: skip
"""Yes, no or if, of rows and columns, the first row's name aside; an engine has one policy, so that pairs of these say
nothing."""


def test_the_whole_table() -> None:
    names = [feature.name for feature in all_features()]
    assert names == [*ANSWERS, "target tensorrt"]
    words = {"y": Support.YES, "n": Support.NO, "i": Support.CONDITION}
    expected = {
        (row, column): text[2 * position] for row, text in ANSWERS.items() for position, column in enumerate(names[1:])
    }
    for one, other in combinations(all_features(), 2):
        if one.is_policy and other.is_policy:
            continue
        found = compare(one, other)
        assert found.support is words[expected[one.name, other.name]], (one.name, other.name)
        assert compare(other, one).support is found.support
        assert bool(found.limits) == (found.support is not Support.YES)


def test_the_documentation_has_the_tables() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert table() in text, f"docs/kv-policies.md is not what the code says; it should hold:\n{table()}"
    assert needs_table(tuple(policies().values())) in text, needs_table(tuple(policies().values()))


def test_the_worst_limit_counts_and_every_reason_of_it_is_named() -> None:
    verdict = compare(feature_of(H2O()), m.PAGING)
    assert verdict.support is Support.CONDITION and len(verdict.limits) == 2
    assert verdict.text == (
        "if: no prefix is taken over, as none of its queries would be observed; copy a shared page before the change, "
        "unpublish it where it is changed"
    )
    both = m.Feature("both", limits={Need.ONE_QUERY: m.SPECULATION.limits[Need.ONE_QUERY]} | dict(m.PAGING.limits))
    assert compare(both, feature_of(ShadowKV())).text == "no: drafts are queries as well"


def test_what_is_built_goes_together_without_a_policy() -> None:
    built = [feature for feature in all_features() if feature.is_built and not feature.is_policy]
    assert len(built) == 10
    caches = (m.QUANTIZED_CACHE, ()), (m.INT4_CACHE, (m.TENSORRT,)), (m.GROUPED_CACHE, (m.CUDA, m.TENSORRT))
    for cache, others in caches:
        refused = (*(other for other, _ in caches if other is not cache), *others)
        check([feature_of(Full()), *(feature for feature in built if not any(feature is one for one in refused))])


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (
            m.SPECULATION,
            "--kv-policy shadowkv needs one query per sequence and step, but with speculation drafts are queries as "
            "well; build with --max-draft-len 0.",
        ),
        (
            m.QUANTIZED_CACHE,
            "--kv-policy shadowkv needs K,V in the model's dtype, but with 8-bit cache the numbers in it have another; "
            "give a --kv-dtype that is the --dtype.",
        ),
        (
            m.SLIDING_WINDOW,
            "--kv-policy shadowkv needs layers that attend to all tokens, but with sliding windows some layers see "
            "only the last tokens; leave --kv-policy out for this model.",
        ),
        (
            m.TENSORRT,
            "--kv-policy shadowkv needs state of each sequence beside its pages, but with target tensorrt the graphs "
            "take pages alone; build with --target cpu, or with cuda where that goes with the rest.",
        ),
    ],
)
def test_refusals_say_what_to_do(other, sentence) -> None:
    for pair in ([feature_of(ShadowKV()), other], [other, feature_of(ShadowKV())]):
        with pytest.raises(BuildError) as error:
            check(pair)
        assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (
            feature_of(H2O()),
            "--kv-policy h2o needs to change K,V that are already written, but with 4-bit cache what is written stays "
            "as it was rounded, two numbers in a byte; give --kv-dtype int8 "
            "where that goes with the rest, or that of the --dtype.",
        ),
        (
            m.TENSORRT,
            "4-bit cache needs two numbers in a byte of the cache, but with target tensorrt the plugins read whole "
            "bytes; build with --target cpu, or with cuda where that goes with the rest.",
        ),
    ],
)
def test_a_4_bit_cache_says_what_it_does_not_go_with(other, sentence) -> None:
    with pytest.raises(BuildError) as error:
        check([m.INT4_CACHE, other])
    assert str(error.value) == sentence


def test_eviction_says_what_it_does_not_go_with() -> None:
    with pytest.raises(BuildError) as error:
        check([feature_of(H2O()), m.SINGLE_INPUT_KV])
    assert str(error.value) == (
        "--kv-policy h2o needs the attention of every token, those of the prompt among them, but with SingleInputKV "
        "prompt tokens attend to nothing above the cut; take a checkpoint without a cut."
    )
    check([feature_of(SnapKV()), m.PAGING, m.SINGLE_INPUT_KV, m.ACROSS_KV, m.QUANTIZED_CACHE])


def test_heads_that_share_a_budget_are_for_the_cpu() -> None:
    with pytest.raises(BuildError) as error:
        check([feature_of(AdaKV()), m.CUDA])
    assert str(error.value) == (
        "--kv-policy adakv needs another length for each KV head, but with target cuda attention takes whole pages of "
        "all heads; build with --target cpu."
    )
    check([feature_of(AdaKV()), m.PAGING, m.SINGLE_INPUT_KV, m.ACROSS_KV, m.QUANTIZED_CACHE])


def test_shadowkv_goes_with_the_rest() -> None:
    check([feature_of(ShadowKV()), m.PAGING, m.SINGLE_INPUT_KV, m.ACROSS_KV])


def test_a_new_policy_is_a_class_with_its_needs() -> None:
    @dataclass(frozen=True)
    class Sinks(Full):
        name: ClassVar[str] = "sinks"
        needs: ClassVar[frozenset[Need]] = frozenset({Need.CACHE_POSITIONS})

    with pytest.raises(BuildError) as error:
        check([feature_of(Sinks()), m.PAGING])
    assert str(error.value) == (
        "--kv-policy sinks needs keys rotated at their index in the cache, but with pages, shared prefixes shared keys "
        "are rotated at their true positions; choose another --kv-policy."
    )


def test_every_need_is_limited_by_something() -> None:
    """A need that all meet would say nothing."""
    limited = {need for feature in all_features() for need in feature.limits}
    assert limited == set(Need)
