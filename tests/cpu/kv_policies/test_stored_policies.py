"""Under each kind of policy and format, a prefix from files is worth what one from memory is, in every bit."""

from pathlib import Path
from typing import Any

import pytest

from kvforge.runtime import LLMEngine, SamplingParams
from tests.support.models.small_models import small_session

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [3 + (5 * place * place) % 90 for place in range(90)]
CASES: tuple[dict[str, Any], ...] = (
    {"kv_policy": "full"}, {"kv_dtype": "int8", "dtype": "bfloat16"}, {"kv_dtype": "kivi2", "page_size": 32},
    {"kv_policy": "quest:budget=8,chunk_size=4"}, {"kv_policy": "snapkv:budget=48"}, {"kv_policy": "adakv:budget=48"},
    {"kv_policy": "streaming:budget=24"},
    {"kv_policy": "shadowkv:chunk_size=4,sparse_budget=16,num_outlier_chunks=1,num_local_tokens=8,rank=8"},
)  # fmt: skip


def answer(engine: LLMEngine) -> tuple[int, list[Any]]:
    """Reused prompt tokens, and every log-probability of a text."""
    before, found = engine.stats()["num_reused_tokens"], list[Any]()
    engine.add_request("a", PROMPT, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=4))
    while engine.has_unfinished():
        found += [(entry.token_id, entry.top) for output in engine.step() for entry in output.logprobs or ()]
        engine.check_invariants()
    return engine.stats()["num_reused_tokens"] - before, found


@pytest.mark.parametrize("options", CASES, ids=str)
def test_a_restart_changes_no_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    session = small_session(options, head_dim=32)
    one = LLMEngine(session=session, num_pages=64, prefix_dir=tmp_path)
    assert answer(one)[0] == 0
    from_memory = answer(one)
    one.close()
    restarted = LLMEngine(session=session, num_pages=64, prefix_dir=tmp_path)
    assert answer(restarted) == from_memory and from_memory[0] > 0 and len(from_memory[1]) == 12
    assert restarted.stats()["num_stored_reused_tokens"] == from_memory[0]
