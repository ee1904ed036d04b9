"""How close OpenVINO's models are to the model itself, on the texts of ``perf.real_model.closeness``.

    python -m perf.real_model.openvino TEACHER TEXTS NAME=FOLDER ... [--num-documents 24] [--length 1024]
        [--exact] [--output perf/results/NAME]

The interpreter has openvino and kvforge's dependencies, and FOLDER is what optimum-cli exports. KV cache in the dtype
of the computation, bf16 where the CPU has it for OpenVINO; with ``--exact`` all in float32, and activations are not
quantized. Writes OUTPUT.json and .md; OUTPUT may be that of ``closeness``, whose rows stay.
"""

import argparse
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvforge.evaluation.compare import Comparison, fidelity, kl_divergence
from kvforge.evaluation.documents import text_documents
from kvforge.manifest import load_manifest
from kvforge.runtime import LLM
from kvforge.runtime.scoring.score import lowest_argmax, stream_logits
from perf.harness.experiment import Experiment
from perf.harness.options import flag, named, number, option, output, place
from perf.harness.tables import Row
from perf.real_model import closeness

ROWS_AT_ONCE = 32


class Model:
    """A compiled model that is given one whole document at a time."""

    def __init__(self, folder: Path, is_exact: bool) -> None:
        import openvino

        core = openvino.Core()
        has_bf16 = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        dtype = "bf16" if has_bf16 and not is_exact else "f32"
        settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": dtype, "KV_CACHE_PRECISION": dtype}
        if is_exact:
            settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
        self._request = core.compile_model(folder / "openvino_model.xml", "CPU", settings).create_infer_request()

    def logits(self, document: list[int]) -> Tensor:
        """Return ``[T, vocab]`` float32."""
        ids = torch.tensor([document])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs |= {"position_ids": torch.arange(len(document))[None], "beam_idx": torch.zeros(1, dtype=torch.int32)}
        self._request.reset_state()
        found = self._request.infer({name: tensor.numpy() for name, tensor in inputs.items()})
        return torch.from_numpy(found["logits"][0].copy())


def compare(model: Model, teacher: LLM, documents: list[list[int]]) -> Comparison:
    """Return what ``compare_with_teacher`` does of an engine."""
    rows = []
    for document in documents:
        ours, sums = model.logits(document), [0.0, 0, 0.0, 0.0]
        with closing(stream_logits(teacher, [(document[:1], document[1:])], max_survivors=ROWS_AT_ONCE)) as chunks:
            for chunk in chunks:
                mine = ours[chunk.start : chunk.start + len(chunk.logits)]
                sums[0] += float(kl_divergence(chunk.logits, mine).sum())
                sums[1] += int((lowest_argmax(chunk.logits) == lowest_argmax(mine)).sum())
                for place, logits in ((2, mine), (3, chunk.logits)):
                    sums[place] -= float(logits.log_softmax(-1).gather(1, chunk.token_ids[:, None]).sum())
        rows.append(sums)
    return Comparison(tuple(len(document) - 1 for document in documents), *zip(*rows, strict=True))


def make_report(args: argparse.Namespace) -> list[Row]:
    """Measure every model on every text. ``weight_bits`` are those of all constants a weight, scales and zero points
    among them."""
    rows = []
    teacher = LLM(args.teacher, num_pages=-(-args.length // 32), max_seq_len=args.length)
    num_weights = load_manifest(args.teacher).num_parameters
    for name, folder in args.models:
        model, bits = Model(folder, args.exact), 8 * (folder / "openvino_model.bin").stat().st_size / num_weights
        for text in tqdm(closeness.texts_of(args.texts), unit="text", disable=None):
            documents = text_documents(text, teacher.tokenizer, args.num_documents, args.length)
            found = {"num_documents": len(documents), "num_tokens": sum(map(len, documents)) - len(documents)}
            found |= fidelity(compare(model, teacher, documents))
            rows.append({"name": name, "kind": text.stem, "weight_bits": bits, **found, "source": text.name})
    return rows


EXPERIMENT = Experiment(
    "perf.real_model.openvino", __doc__,
    options=(
        place("teacher"), place("texts"), option("models", type=named, nargs="+", metavar="NAME=FOLDER"),
        number("--num-documents", 24, "of a kind (default %(default)s)"),
        number("--length", 1024, "tokens of a document (default %(default)s)"),
        flag("--exact", "compute in float32, with the weights alone rounded"), output("OUTPUT.json and .md"),
    ),
    measure=make_report, merged=("name", "kind"), is_dated=True, shown=closeness.markdown,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
