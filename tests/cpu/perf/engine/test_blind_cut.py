"""The benchmark of blind cuts: what its requests keep, and its table."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from kvforge.compiler import BuildOptions
from kvforge.runtime import LLMEngine
from model_defs import load_config
from perf.engine.blind_cut import EXPERIMENT, OTHERS, SHAPES, SINGLE, kept, models, separate
from perf.harness.batch import Batch
from perf.harness.random_checkpoint import write_checkpoint
from tests.support.sessions.eager import eager_session

ARGS = Namespace(input_tokens=8192, output_tokens=48)


def test_what_requests_keep() -> None:
    """Of 48 output tokens the last is never written; 32 anchors and the prompt's last token are seen above the cut."""
    owners = {"213M": [16, 9, 16], "8B/8": [4, 3, 4]}
    assert list(owners) == list(SHAPES)
    for shape, numbers in owners.items():
        made = models(shape)
        found = {name: kept(load_config(hf), ARGS) for name, hf in made.items()}
        assert found == dict.fromkeys(made, (8239, 8239)) | {"blind": (8239, 32 + 1 + 47)}
        assert [load_config(hf).num_owners for hf in made.values()] == numbers


def test_the_table() -> None:
    row = {"model": "blind", "batch": 1, "step_s": 0.028, "of_single_input": 0.8}
    row |= {"cache_read_bytes": 64 << 20, "reads_of_single_input": 0.5, "allocated_bytes": 8, "planned_bytes": 8}
    report = {"command": "c", "machine": "m", "shape": "213M", "input_tokens": 8192, "output_tokens": 48, "rows": [row]}
    assert "| blind | 1 | 28.0 | 0.80 | 64.0 | 0.50 | 0.00 | 1.0000 |" in EXPERIMENT.show(report)


@pytest.mark.parametrize("name", [SINGLE, *OTHERS])
def test_requests_with_one_prompt_get_pages_of_their_own(name: str, tmp_path: Path) -> None:
    """Tokens are those of a request alone that shares nothing, and the pool has no page more than the plan."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = models("213M")[name] | sizes | heads
    config = load_config(model)
    checkpoint = write_checkpoint(tmp_path / "model", model)
    session = eager_session(checkpoint, BuildOptions(dtype="float32", page_size=16, max_num_seqs=3, max_seq_len=128))
    prompt, page = [*range(3, 83)], session.manifest.page_size
    below, above = (3 * -(-count // page) for count in kept(config, Namespace(input_tokens=80, output_tokens=20)))
    engine = LLMEngine(session=session, num_pages=below, num_upper_pages=above if config.is_blind else None)
    running = Batch(engine, [prompt] * 3, 20)
    running.start()
    assert len({tuple(one.pages[:4]) for one in engine.scheduler.running}) == 1
    separate(engine)
    pages = [page for one in engine.scheduler.running for page in one.pages]
    assert len(pages) >= 15 and len(pages) - len(set(pages)) == (2 * 2 if config.is_blind else 0)  # those of anchors
    engine.check_invariants()
    for pool in engine.runner.pools[: config.cut if config.is_blind else None]:
        of_requests = [[tensor[one.pages[:4]] for tensor in pool] for one in engine.scheduler.running]
        assert all(torch.equal(*pair) for one in of_requests[1:] for pair in zip(of_requests[0], one, strict=True))
    running.finish()
    alone = Batch(LLMEngine(session=session, num_pages=below, enable_prefix_cache=False), [prompt], 20)
    alone.finish()
    assert running.tokens == alone.tokens * 3
