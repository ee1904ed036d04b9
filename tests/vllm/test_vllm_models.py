"""SwiftKV models on vLLM: the tokens of kvforge's own graphs, layers above the cut for survivors alone, fewer caches.

They need an environment with vLLM for CPUs, which is another than this one's; docs/distributed.md says how to make it:

    KVFORGE_VLLM_PYTHON=VENV/bin/python python -m pytest tests/vllm
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvforge.compiler.options import BuildOptions
from kvforge.runtime import LLMEngine, SamplingParams
from model_defs import families
from tests.support.models.checkpoints import WITH_HEADS, make_checkpoint
from tests.support.sessions.eager import eager_session
from tests.support.vllm.cuts import RUN

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
SWIFTKV = ROOT / "model_defs" / "assets" / "tiny-swiftkv"
PYTHON = os.environ.get("KVFORGE_VLLM_PYTHON")
MAX_TOKENS = 16
LEFT_OVER = 8
"""Owners' pages that one gibibyte may have left, when whole pages of all owners are counted."""
PROMPTS = [[(7 * i * i + 3 * i + length) % 300 + 4 for i in range(length)] for length in (5, 40, 90, 150)]
"""One shorter than a block of the cache, and two that a step of 64 tokens cuts into chunks."""

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="needs vLLM; set KVFORGE_VLLM_PYTHON to the python of its environment"),
    pytest.mark.timeout(900),
]


class NotRun(AssertionError):
    """vLLM did not run; what it printed."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that says to vLLM what an installed kvforge would: the entry points of pyproject.toml."""
    folder = tmp_path_factory.mktemp("installed")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (folder / "kvforge-0.dist-info").mkdir()
    (folder / "kvforge-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: kvforge\nVersion: 0\n")
    plugin = project["entry-points"]["vllm.general_plugins"]
    lines = ["[vllm.general_plugins]", *(f"{name} = {value}" for name, value in plugin.items())]
    (folder / "kvforge-0.dist-info" / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def on_vllm(
    installed: Path, tmp_path: Path, checkpoint: Path, size: int = 1, fast: bool = True, stages: int = 1
) -> dict[str, Any]:
    job = {
        "checkpoint": str(checkpoint),
        "prompts": PROMPTS,
        "max_tokens": MAX_TOKENS,
        "tensor_parallel_size": size,
        "pipeline_parallel_size": stages,
        "fast_prefill": fast,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{installed}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if size * stages == 1 else "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(size * stages))),
    }
    script = ROOT / "tests" / "support" / "vllm" / "generate.py"
    command = [str(PYTHON), str(script), str(tmp_path / "job.json"), str(tmp_path / "result.json")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    if done.returncode:
        raise NotRun(done.stdout + done.stderr)
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    return result


@functools.cache
def own_tokens(checkpoint: Path) -> list[list[int]]:
    engine = LLMEngine(session=eager_session(checkpoint, BuildOptions(dtype="float32")), num_pages=64)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, params)
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    while engine.has_unfinished():
        for output in engine.step():
            tokens[int(output.request_id)] += output.new_token_ids
    return tokens


def test_prompt_tokens_end_at_the_cut(installed: Path, tmp_path: Path) -> None:
    result = on_vllm(installed, tmp_path, SWIFTKV)
    assert result["tokens"] == own_tokens(SWIFTKV)
    # Each step runs one row a sequence above the cut; a prompt cut into c chunks has c of them before its last.
    num_generated = len(PROMPTS) * MAX_TOKENS
    assert num_generated <= result["num_upper_rows"] <= num_generated + sum(map(len, PROMPTS)) // 32
    # Six owners of eight layers: K and V of two heads of 64 float32 numbers each.
    assert result["cache_bytes_per_token"] == 6 * 2 * 2 * 64 * 4


def test_without_fast_prefill_all_tokens_run_all_layers(installed: Path, tmp_path: Path) -> None:
    result = on_vllm(installed, tmp_path, SWIFTKV, fast=False)
    assert result["tokens"] == own_tokens(SWIFTKV)
    assert result["num_upper_rows"] == sum(map(len, PROMPTS)) + len(PROMPTS) * (MAX_TOKENS - 1)


def test_caches_above_the_cut_are_shared(installed: Path, tmp_path: Path) -> None:
    """A cut at half with groups of four: 5 of 8 caches, as vLLM allocates them."""
    results = {}
    for cut in (None, 4):
        checkpoint = make_checkpoint(
            tmp_path / f"cut-{cut}", cut=cut, group_size=4, num_hidden_layers=8, head_dim=32, hidden_size=128
        )
        if cut is not None:
            name_class(checkpoint, "llama")
        results[cut] = on_vllm(installed, tmp_path, checkpoint, fast=cut is not None)
    assert results[None]["cache_bytes_per_token"] == 8 * 2 * 2 * 32 * 4
    assert results[4]["cache_bytes_per_token"] == results[None]["cache_bytes_per_token"] * (1 - 0.375)
    assert results[4]["num_pages"] * 5 == pytest.approx(results[None]["num_pages"] * 8, abs=LEFT_OVER)


def test_two_ranks(installed: Path, tmp_path: Path) -> None:
    assert on_vllm(installed, tmp_path, SWIFTKV, size=2)["tokens"] == own_tokens(SWIFTKV)


def small(path: Path, family: str) -> Path:
    """With a ragged last group; heads of 32, which is the smallest that vLLM has for CPUs."""
    options = {"tie_word_embeddings": family == "qwen2", "head_dim": 32, "hidden_size": 128}
    checkpoint = make_checkpoint(
        path, family, cut=2, group_size=2, num_hidden_layers=5, max_position_embeddings=512, **options
    )
    name_class(checkpoint, family)
    return checkpoint


def name_class(checkpoint: Path, family: str) -> None:
    """As ``kvforge rewire`` does."""
    hf = json.loads((checkpoint / "config.json").read_text())
    hf["architectures"] = [families()[family].swiftkv_architecture]
    (checkpoint / "config.json").write_text(json.dumps(hf))


@pytest.mark.parametrize("family", RUN)
def test_families(family: str, installed: Path, tmp_path: Path) -> None:
    checkpoint = small(tmp_path / family, family)
    result = on_vllm(installed, tmp_path, checkpoint)
    assert result["tokens"] == own_tokens(checkpoint)
    assert result["num_upper_rows"] < sum(map(len, PROMPTS))


@pytest.mark.parametrize("family", sorted(set(WITH_HEADS) - set(RUN)))
def test_families_that_the_plugin_does_not_have(family: str, installed: Path, tmp_path: Path) -> None:
    with pytest.raises(NotRun, match=f"SwiftKV checkpoints of {family} do not run on vLLM"):
        on_vllm(installed, tmp_path, small(tmp_path / family, family))
