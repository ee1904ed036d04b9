"""EAGLE-3 heads on vLLM's own module and in kvforge: the same drafts, of which as many are right."""

import itertools
import json
import os
import random
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvforge.compiler.options import BuildOptions
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.draft_length import DraftLength
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.draft_heads import draft_only, make_head, noted_drafts
from tests.support.sessions.eager import eager_session
from tests.vllm.conftest import MODEL, PYTHON

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "vllm" / "eagle.py"
NUM_DRAFTS, MAX_TOKENS = 4, 40


def on_vllm(folder: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    (folder / "job.json").write_text(json.dumps(job))
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(PYTHON), str(SCRIPT), "job.json", "result.json"]
    done = subprocess.run(command, env=os.environ | own, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result: list[dict[str, Any]] = json.loads((folder / "result.json").read_text())
    return result


def decode(target: Path, head: Path | None, prompt: list[int]) -> dict[str, Any]:
    """As the result of the script; of each step also how many drafts were right."""
    more = {} if head is None else {"draft_head": str(head), "max_draft_len": NUM_DRAFTS}
    session = eager_session(target, BuildOptions(dtype="float32", max_seq_len=128, **more))
    speculative = None if head is None else SpeculativeConfig("eagle3", NUM_DRAFTS)
    engine = LLMEngine(session=session, num_pages=64, speculative=speculative)
    seen = [] if head is None else noted_drafts(engine)
    engine.add_request("r", prompt, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True))
    steps = [output.new_token_ids for _ in iter(engine.has_unfinished, False) for output in engine.step()]
    drafts = [[len(tokens), found] for tokens, found in seen]
    right = [len(step) - 1 for step in steps[1:]]
    accepted = [sum(count > place for count in right) for place in range(NUM_DRAFTS)]
    return {"tokens": list(itertools.chain(*steps)), "drafts": drafts, "accepted": accepted}


@pytest.mark.parametrize(
    ("layers", "fields"),
    [((1, 2, 4), {}), ((0, 2, 3), {"norm_before_residual": True, "table": True})],
    ids=["of the model's embedding", "of its own"],
)
def test_drafts_are_vllm_s(tmp_path: Path, monkeypatch, layers: tuple[int, ...], fields: dict[str, Any]) -> None:
    """A random head that drafts the texts' commonest tokens alone, so that some drafts are right."""
    monkeypatch.setattr(DraftLength, "is_due", lambda self, num_sequences: True)
    monkeypatch.setattr(DraftLength, "choose", lambda self, num_sequences, available: dict(available))
    monkeypatch.setattr(DraftLength, "pays_for_prompts", True)
    target, rng = make_checkpoint(tmp_path / "target", "llama", **MODEL), random.Random(0)
    prompts = [[rng.randrange(3, 320) for _ in range(count)] for count in (3, 11, 40, 70)]
    texts = [decode(target, None, prompt)["tokens"] for prompt in prompts]
    commonest = [token for token, _ in Counter(itertools.chain(*texts)).most_common(4)]
    sizes = {"head_dim": 32, "max_position_embeddings": 256, "eagle_aux_hidden_state_layer_ids": layers}
    head = draft_only(make_head(tmp_path / "head", target, draft_vocab=4, **sizes, **fields), commonest)
    job = {"checkpoint": str(target), "head": str(head), "prompts": prompts}
    results = on_vllm(tmp_path, job | {"max_tokens": MAX_TOKENS, "num_drafts": NUM_DRAFTS})
    total = Counter[str]()
    for prompt, text, theirs in zip(prompts, texts, results, strict=True):
        ours = decode(target, head, prompt)
        assert ours["tokens"] == theirs["tokens"] == text
        behind = dict(theirs["drafts"])
        # near the end a draft is here no longer than the text, and vLLM drafts beyond it
        assert [length for length, _ in ours["drafts"]] == list(behind)[: len(ours["drafts"])]
        assert all(drafts == behind[length][: len(drafts)] for length, drafts in ours["drafts"])
        assert ours["accepted"] == theirs["accepted"]
        total.update(drafts=sum(len(drafts) for _, drafts in ours["drafts"]), right=sum(ours["accepted"]))
    print(f"{total['right']} of {total['drafts']} drafts right")
    assert total["right"] > 5
