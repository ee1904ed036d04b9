"""Which features go together: the whole table, the documentation made from it, and policies made up."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from kvforge.common.errors import BuildError
from kvforge.kv_policies import Full, Need
from kvforge.kv_policies import features as m
from kvforge.kv_policies.compatibility import check, compare
from kvforge.kv_policies.eviction.rules.adakv import AdaKV
from kvforge.kv_policies.eviction.rules.h2o import H2O
from kvforge.kv_policies.eviction.rules.snapkv import SnapKV
from kvforge.kv_policies.features import Support, all_features, feature_of
from kvforge.kv_policies.shadowkv import ShadowKV
from tests.support.compatibility_docs import DOCS, table, updated


def test_the_documentation_has_the_tables() -> None:
    written = DOCS.read_text(encoding="utf-8")
    assert updated(written) == written, "run python -m tests.support.compatibility_docs"


def test_a_table_says_each_pair_once_and_numbers_its_reasons() -> None:
    pairs, reasons = (part.splitlines() for part in table().split("\n\n"))
    columns = pairs[0].split(" | ")[1:]
    row = dict(zip(columns, pairs[2].split(" | ")[1:], strict=True))
    assert pairs[2].startswith("| SingleInputKV |") and row["Batch-Max, H2O, RoCo"] == "no 2"
    assert reasons[3] == "| 2 | prompt tokens attend to nothing above the cut |"
    assert row["speculation"] == "yes" and row["KV prediction"] == "no 3, 4"


def test_the_worst_limit_counts_and_every_reason_of_it_is_named() -> None:
    verdict = compare(feature_of(H2O()), m.PAGING)
    assert verdict.support is Support.CONDITION and len(verdict.limits) == 2
    assert verdict.reasons == (
        "no prefix is taken over, as none of its queries would be observed",
        "copy a shared page before the change, unpublish it where it is changed",
    )
    both = m.Feature("both", limits={Need.ONE_QUERY: m.SPECULATION.limits[Need.ONE_QUERY]} | dict(m.PAGING.limits))
    assert compare(both, feature_of(ShadowKV())).reasons == ("drafts are queries as well",)


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
