"""GGUF files beside llama.cpp: tokens of odd texts, dequantized tensors, logits and greedy tokens.

    python -m perf.peers.gguf FILE.gguf … --llama-python VENV/bin/python [--tensors] [--logits]

VENV has llama-cpp-python. Tokens are compared with special tokens read, as in chat. Logits are those of the plain
reference in float32 of what is dequantized here; llama.cpp rounds activations to 8 bits where weights are in blocks.
Tensors are those of the file that llama.cpp's quantizer makes of it in float32.
Greedy tokens are compared to the first difference, and there the gap between this side's two best logits is shown.
"""

import argparse
import json
import subprocess
import tempfile
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvforge.checkpoint.gguf.config import family_of_file
from kvforge.checkpoint.gguf.derived_tensors import GgufPiece
from kvforge.checkpoint.gguf.header import Header, read_header
from kvforge.checkpoint.gguf.texts import make_tokenizer
from kvforge.checkpoint.gguf.vocabulary import CONTROL, USER_DEFINED, read_vocabulary
from kvforge.checkpoint.model import check_weights, open_model, read_model_config
from kvforge.common.errors import CheckpointError, KvforgeError
from model_defs.reference import reference_logits
from model_defs.weights import weight_specs
from perf.harness.engines import ROOT
from perf.harness.experiment import Experiment, flag, number, output, place, seed
from perf.peers.odd_texts import odd_texts

PROMPTS = (
    "The capital of France is", "Once upon a time, in a village by the sea,", "def fibonacci(n):\n    ",
    "Water boils at a temperature of", "The three laws of thermodynamics say that", "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to", "In 1969, the first human being to walk on the Moon was",
)  # fmt: skip
SHOWN = 5
FLOAT32 = "ALL_F32"
"""llama.cpp's name of the format."""


def asked_of_llama(python: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Return what llama.cpp answers; raises KvforgeError where it does not."""
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder) / "asked.json", Path(folder) / "answered.json"
        question.write_text(json.dumps(asked), encoding="utf-8")
        command = [str(python), "-m", "perf.peers.gguf_worker", str(question), str(answer)]
        if status := subprocess.run(command, cwd=ROOT).returncode:
            raise KvforgeError(f"{python} ended with status {status} for {asked['file']}; see any words of it above.")
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def compare(file: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the row of one file."""
    header = read_header(file)
    vocabulary = read_vocabulary(header)
    tokenizer = make_tokenizer(header, vocabulary, _keeps_space_after(header))
    kinds = zip(vocabulary.tokens, vocabulary.types, strict=True)
    special = [text for text, kind in kinds if kind in (CONTROL, USER_DEFINED)]
    texts = odd_texts(args.num_texts, args.seed, special)
    prompts = [tokenizer.encode(text).ids for text in PROMPTS] if args.logits else []
    asked = {
        "file": str(file), "texts": texts, "prompts": prompts, "greedy": prompts, "output_tokens": args.output_tokens,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "float32.gguf"
        quantized = [(str(file), str(copy), FLOAT32)] if args.tensors else []
        theirs = asked_of_llama(args.llama_python, {**asked, "quantized": quantized})
        tensors = tensors_beside(header, copy) if args.tensors else {}
    ours = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    different = [index for index, ids in enumerate(ours) if ids != theirs["texts"][index]]
    row: dict[str, Any] = {"file": file.name, "texts": len(texts), "different_texts": len(different)}
    row["examples"] = [_example(vocabulary.tokens, texts[i], ours[i], theirs["texts"][i]) for i in different[:SHOWN]]
    row["different_and_composed"] = sum(unicodedata.is_normalized("NFC", texts[index]) for index in different)
    return row | tensors | (_logits(file, prompts, theirs) if args.logits else {})


def tensors_beside(header: Header, copy: Path) -> dict[str, Any]:
    """How many tensors have other numbers in a copy that llama.cpp dequantized."""
    theirs = {tensor.name: GgufPiece(tensor) for tensor in read_header(copy).tensors}
    ours = {tensor.name: GgufPiece(tensor) for tensor in header.tensors}
    different = [name for name, piece in ours.items() if not torch.equal(piece.read().float(), theirs[name].read())]
    kinds = sorted({tensor.kind for tensor in header.tensors})
    return {"tensors": len(ours), "different_tensors": len(different), "formats": kinds}


def _keeps_space_after(header: Header) -> frozenset[str] | None:
    """What the family says of spaces; files of a vocabulary alone may be of families that are not read."""
    try:
        form = family_of_file(header).gguf
    except CheckpointError:
        return None
    return None if form is None else form.keeps_space_after


def _example(tokens: Any, text: str, ours: list[int], theirs: list[int]) -> dict[str, Any]:
    """Where two lists of tokens of a text begin to differ."""
    at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), 0)
    near = slice(max(at - 1, 0), at + 4)
    return {"text": text[:80], "ours": [tokens[i] for i in ours[near]], "llama.cpp": [tokens[i] for i in theirs[near]]}


def _logits(file: Path, prompts: list[list[int]], theirs: dict[str, Any]) -> dict[str, Any]:
    checkpoint = open_model(file)
    config = read_model_config(checkpoint)
    check_weights(checkpoint, config)
    sources = {source.name: source.shape for spec in weight_specs(config) for source in spec.sources}
    weights = {name: checkpoint.read(name, shape, torch.float32) for name, shape in sources.items()}
    divergence, largest, same, positions, firsts = 0.0, 0.0, 0, 0, []
    for ids, other, continued in zip(prompts, theirs["prompts"], theirs["greedy"], strict=True):
        found = reference_logits(config, weights, torch.tensor([*ids, *continued]))
        own, given = found[: len(ids)], torch.tensor(other)
        logs = own.log_softmax(-1)
        divergence += float((logs.exp() * (logs - given.log_softmax(-1))).sum())
        largest = max(largest, float((own - given).abs().max()))
        same += int((own.argmax(-1) == given.argmax(-1)).sum())
        positions += len(ids)
        firsts.append(_first_difference(found[len(ids) - 1 : -1], continued))
    agreed = [first for first, _ in firsts]
    return {
        "logits": {
            "positions": positions,
            "mean_kl": divergence / positions,
            "largest_difference": largest,
            "same_best": same / positions,
        },
        "greedy": {
            "texts": len(agreed),
            "tokens": len(theirs["greedy"][0]),
            "whole": sum(first == len(theirs["greedy"][0]) for first in agreed),
            "first_differences": [{"token": f, "gap": gap} for f, gap in firsts if gap is not None],
        },
    }


def _first_difference(logits: torch.Tensor, given: list[int]) -> tuple[int, float | None]:
    """At which of the ``given`` tokens the best logit is another's, and by how much; all and None where nowhere."""
    best = logits.max(-1)
    for index, token in enumerate(given):
        if int(best.indices[index]) != token:
            return index, float(best.values[index] - logits[index, token])
    return len(given), None


def _logit(name: str, form: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: format(row["logits"][name], form) if "logits" in row else ""


EXPERIMENT = Experiment(
    "perf.peers.gguf", __doc__,
    options=(
        place("files", nargs="+", metavar="FILE"),
        place("--llama-python", "an interpreter with llama-cpp-python", required=True), number("--num-texts", 5000),
        seed(), flag("--tensors", "also every tensor, dequantized by either"),
        flag("--logits", "also logits and greedy tokens of eight prompts"), number("--output-tokens", 32),
        output("OUTPUT.json and OUTPUT.md"),
    ),
    measure=lambda args: [compare(file, args) for file in args.files], is_dated=True,
    columns=(
        ("file", "file", "`{}`"), ("texts", "texts"), ("with other tokens", "different_texts"),
        ("of them in NFC", "different_and_composed"), ("tensors", "tensors"), ("other tensors", "different_tensors"),
        ("KL", _logit("mean_kl", ".2e")), ("largest difference of a logit", _logit("largest_difference", ".3f")),
        ("same best", _logit("same_best", ".1%")),
        (
            "greedy texts as llama.cpp",
            lambda row: "{whole} of {texts}".format_map(row["greedy"]) if "greedy" in row else "",
        ),
    ),
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
