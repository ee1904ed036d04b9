"""The graph ``verify``: what the operator's definition says, and greedy tokens that drafts do not change."""

import random
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import plugins
from kvforge.common.errors import EngineError
from kvforge.manifest import load_manifest
from kvforge.runtime.sessions.inputs import VerifyStep
from kvforge.runtime.sessions.session import Session, load_session
from plugins.speculative_verify.cases import random_case as speculative_verify_case
from tests.support.models.engines import SWIFTKV, SWIFTKV_FP8
from tests.support.models.shelf import EngineShelf
from tests.support.schedules.step_driver import StepDriver


@lru_cache
def session_of(engine: Path) -> Session:
    return load_session(engine, load_manifest(engine))


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_the_compiled_graph_is_the_definition(engines: EngineShelf) -> None:
    """No sequences, no drafts, with and without distributions, greedy and sampled: counts come from the inputs."""
    session = session_of(engines.engine(SWIFTKV_FP8))
    reference = plugins.OPERATORS["speculative_verify"].reference
    num_sequences = num_equal = 0
    for seed in range(80):
        arguments = speculative_verify_case(seed, small=True)
        got, expected = session.verify(VerifyStep(*arguments)), reference(*arguments)
        assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in expected]
        num_sequences += len(expected[0])
        num_equal += int(((got[0] == expected[0]) & (got[1] == expected[1])).sum())
    # A drawn number can lie on the boundary between two tokens within float32's error; 1 in 100 would be no accident.
    assert num_equal >= num_sequences - 1 > 80


def generate(session: Session, prompt: list[int], count: int, rng: random.Random | None) -> tuple[list[int], int]:
    """Greedy tokens and how many steps they took: with ``rng``, 0 to 4 drafts a step, each right with 70%."""
    plain = generate(session, prompt, count, None)[0] if rng else []
    driver = StepDriver(session, seed=1)
    tokens = [int(driver.run(prompt, num_survivors=1).argmax())]
    steps, empty = 1, torch.zeros(0, session.manifest.vocab_size)
    while len(tokens) < count:
        drafts = []
        for token in plain[len(tokens) : len(tokens) + rng.randint(0, 4)] if rng else []:
            drafts.append(token if rng and rng.random() < 0.7 else 5)
        logits = driver.run([tokens[-1], *drafts])
        starts, uniform = int32([0, len(drafts)]), torch.rand(len(drafts) + 1, 2)
        step = VerifyStep(logits, int32(drafts), starts, empty, torch.zeros(1), uniform)
        accepted, following = session.verify(step)
        driver.length -= len(drafts) - int(accepted)  # rejected drafts' K and V are overwritten
        tokens += [*drafts[: int(accepted)], int(following)]
        steps += 1
    return tokens[:count], steps


def test_drafts_change_the_steps_and_not_the_tokens(engines: EngineShelf) -> None:
    session = session_of(engines.engine(SWIFTKV_FP8))
    for seed in range(6):
        rng = random.Random(seed)
        prompt = [rng.randrange(3, 320) for _ in range(rng.randint(1, 40))]
        expected, plain_steps = generate(session, prompt, 30, None)
        tokens, steps = generate(session, prompt, 30, rng)
        assert tokens == expected
        assert steps < plain_steps == 30


def test_an_engine_without_drafts_has_no_such_graph(engines: EngineShelf) -> None:
    with_drafts, without = engines.engine(SWIFTKV_FP8), engines.engine(SWIFTKV)
    assert (with_drafts / "rank0" / "verify.pt2").is_file() and not (without / "rank0" / "verify.pt2").exists()
    manifest = load_manifest(with_drafts)
    assert (manifest.max_draft_len, manifest.max_num_survivors) == (4, 256)
    assert load_manifest(without).max_num_survivors == manifest.max_num_seqs == 64
    with pytest.raises(EngineError, match="--max-draft-len"):
        session_of(without).verify(VerifyStep(*speculative_verify_case(3, small=True)))
