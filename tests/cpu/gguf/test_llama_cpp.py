"""Files that llama.cpp's own quantizer makes of random checkpoints, beside llama.cpp: 15 formats of every family.

    KVFORGE_LLAMA_PYTHON=VENV/bin/python python -m pytest tests/cpu/gguf/test_llama_cpp.py

VENV has llama-cpp-python.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from kvforge.checkpoint.gguf.header import read_header
from model_defs import families
from perf.peers.gguf import EXPERIMENT, FLOAT32, asked_of_llama, compare, tensors_beside
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.gguf_files import ARCHITECTURES, OWN, write_gguf

PYTHON = os.environ.get("KVFORGE_LLAMA_PYTHON")
pytestmark = pytest.mark.skipif(
    PYTHON is None,
    reason="needs llama.cpp; set KVFORGE_LLAMA_PYTHON to the python of an environment with llama-cpp-python",
)

FORMATS = (
    "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_NL",
    "IQ4_XS",
)  # fmt: skip
"""Beside F32; llama.cpp's names, each of which mixes formats of tensors."""
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip
"""Rows are whole super-blocks of 256, and heads of 16 fill them, as files of some families cannot say otherwise."""
PLAIN: dict[str, dict[str, object]] = {
    "phi3": {"sliding_window": None},
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}
"""llama.cpp ignores the window of one, and rounds the ramp of YaRN, as the other has it by itself (docs/gguf.md)."""
KL = 1e-6
"""Nats a token between two computations in float32."""
TABLES = {"gemma3_text": 2**-6}
"""llama.cpp reads GELU from a table of float16, so that logits of a few units are off by some of its last bits."""
LOGIT = 2**-10
GAP = 2**-9
"""Where a greedy text goes another way, its two best logits are as near."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in F32."""
    folder = tmp_path_factory.mktemp(request.param)
    fields = {**SIZES, **OWN.get(request.param, {}), **PLAIN.get(request.param, {})}
    directory, written = make_checkpoint(folder / "hf", request.param, **fields), folder / f"{request.param}.gguf"
    write_gguf(directory, written)
    return written


def test_every_format_is_dequantized_as_llama_cpp_does(file: Path) -> None:
    made = {form: (file.with_name(f"{form}.gguf"), file.with_name(f"{form}-F32.gguf")) for form in FORMATS}
    quantized = [(file, packed, f"MOSTLY_{form}") for form, (packed, _) in made.items()]
    quantized += [(packed, copy, FLOAT32) for packed, copy in made.values()]
    asked: dict[str, Any] = {"quantized": [(str(of), str(to), form) for of, to, form in quantized]}
    asked_of_llama(Path(str(PYTHON)), {**asked, "file": str(file), "texts": [], "prompts": [], "greedy": []})
    kinds = set()
    for packed, copy in made.values():
        found = tensors_beside(read_header(packed), copy)
        assert found["tensors"] > 10 and not found["different_tensors"], (packed, found)
        kinds.update(found["formats"])
    assert kinds >= {form.removesuffix("_M") for form in FORMATS}


def test_tokens_logits_and_greedy_texts_of_float32(file: Path) -> None:
    command = [str(file), "--llama-python", str(PYTHON), "--num-texts", "200", "--logits"]
    found = compare(file, EXPERIMENT.parse(command))
    if families()[file.stem].gguf.keeps_space_after is None:
        assert not found["different_texts"], found["examples"]
    else:  # the family's own tokenizer strips spaces after special tokens, and knows more kinds of them
        assert found["different_texts"] < 20 and all("</s>" in each["text"] for each in found["examples"])
    assert found["logits"]["mean_kl"] < KL
    assert found["logits"]["largest_difference"] < TABLES.get(file.stem, LOGIT)
    assert all(first["gap"] < GAP for first in found["greedy"]["first_differences"])
