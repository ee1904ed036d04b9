"""What formats of the KV cache cost in bits and in the model's distribution, before any of them has a kernel.

    python -m perf.quality.cache_formats [--model NAME] [--only FORMAT] [--num-documents 48] [--length 512] [--json]

Runs the plain-torch definition of the tiny models in float32 over documents that are full of questions, as those they
learned from but with another seed, each with every format between K and V and attention. Rows of an earlier run in
OUTPUT.json stay where they are not made again, so that models and formats can be run one by one. Writes OUTPUT.json,
.md and .png. Formats are rows of ``perf/quality/cache_table.py``.
"""

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.evaluation.bootstrap import bootstrap_interval
from model_defs import ModelConfig
from model_defs.reference import Attend, attend, reference_logits
from model_defs.rope import apply_rope, rope_tables
from perf.harness.engines import STUDENT_DIR, TEACHER_DIR
from perf.harness.experiment import Experiment, Report, columns_table, interval, number, option, output, told
from perf.harness.plots import panels
from perf.quality.cache_codecs import Codec
from perf.quality.cache_table import FORMATS, CacheFormat
from perf.training.config import TINY_STUDENT
from perf.training.documents import make_batch
from perf.training.tokenizer import FastEncoder

MODELS = {"no cut": TEACHER_DIR, "cut, 2-way": STUDENT_DIR}
CALIBRATION_DOCUMENTS = 8


@dataclass(frozen=True)
class Model:
    """A checkpoint in float32; ``cos`` and ``sin`` ``[length, head_dim / 2]``."""

    config: ModelConfig
    weights: Mapping[str, Tensor]
    cos: Tensor
    sin: Tensor

    @classmethod
    def load(cls, path: Path, length: int) -> "Model":
        """Read all tensors of the checkpoint."""
        checkpoint = open_model(path)
        config = read_model_config(checkpoint)
        weights = {name: checkpoint.read_raw(name).float() for name in checkpoint.file_of_tensor}
        return cls(config, weights, *rope_tables(config.rope, config.head_dim, length))

    def unrotated(self, k: Tensor) -> Tensor:
        """Take the positions out of ``k`` ``[kv_heads, n, head_dim]``."""
        return apply_rope(k.transpose(0, 1), self.cos[: k.shape[1]], -self.sin[: k.shape[1]]).transpose(0, 1)

    def at_positions(self, k: Tensor) -> Tensor:
        """Put them back."""
        return apply_rope(k.transpose(0, 1), self.cos[: k.shape[1]], self.sin[: k.shape[1]]).transpose(0, 1)


@dataclass
class Recorder:
    """Exact attention that keeps each owner's keys before RoPE and values, document by document."""

    model: Model
    seen: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    last: Tensor | None = None

    def __call__(self, owner: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        if k is not self.last:
            self.seen.setdefault(owner, []).append((self.model.unrotated(k), v))
            self.last = k
        return attend(owner, q, k, v, window)

    def joined(self, owner: int) -> tuple[Tensor, Tensor]:
        """Return all keys and values of an owner, ``[kv_heads, tokens, head_dim]``."""
        k, v = (torch.cat(parts, 1) for parts in zip(*self.seen[owner], strict=True))
        return k, v


class Stored:
    """Attention over K and V as a format gives them back."""

    def __init__(self, model: Model, made: CacheFormat, calibration: Recorder) -> None:
        self.model, self.made = model, made
        self.codecs: dict[int, tuple[Codec, Codec]] = {}
        for owner in model.config.owners:
            k, v = calibration.joined(owner)
            self.codecs[owner] = made.keys(k), made.values(v)
        self.last: tuple[Tensor | None, Tensor, Tensor] = (None, torch.empty(0), torch.empty(0))

    def __call__(self, owner: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        if k is not self.last[0]:
            keys, values = self.codecs[owner]
            stored = self.model.at_positions(keys(self.model.unrotated(k))) if self.made.before_rope else keys(k)
            self.last = k, stored, values(v)
        _, k_stored, v_stored = self.last
        if not self.made.residual:
            return attend(owner, q, k_stored, v_stored, window)
        return attend_residual(q, (k, v), (k_stored, v_stored), self.made.residual)


def attend_residual(q: Tensor, exact: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor], residual: int) -> Tensor:
    """Causal attention of ``[heads, n, d]`` over ``[kv_heads, n, d]``, exact within a query's own ``residual``
    positions and stored before them; returns ``[n, heads * d]``."""
    heads, tokens, head_dim = q.shape
    group = heads // exact[0].shape[0]
    row, column = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    near = column // residual == row // residual
    scores = [q @ k.repeat_interleave(group, 0).transpose(1, 2) * head_dim**-0.5 for k, _ in (exact, stored)]
    weights = torch.where(near, *scores).masked_fill(column > row, float("-inf")).softmax(-1)
    mixed = [weights.where(chosen, 0.0) @ v.repeat_interleave(group, 0)
             for chosen, (_, v) in ((near, exact), (~near, stored))]  # fmt: skip
    return (mixed[0] + mixed[1]).transpose(0, 1).reshape(tokens, heads * head_dim)


@torch.inference_mode()
def compare(name: str, formats: list[str], num_documents: int, length: int) -> list[dict[str, Any]]:
    """Return the rows of a model: each format against exact attention, over the same documents."""
    model = Model.load(MODELS[name], length)
    stage = replace(TINY_STUDENT.documents, length=length, sequences=CALIBRATION_DOCUMENTS + num_documents)
    encode = FastEncoder(Tokenizer.from_file(str(MODELS[name] / "tokenizer.json")))
    samples = list(make_batch("cache formats", stage, encode).input_ids)

    def logits(ids: Tensor, attention: Attend) -> Tensor:
        return reference_logits(model.config, model.weights, ids, attend=attention).double().log_softmax(-1)

    recorder = Recorder(model)
    for ids in samples[:CALIBRATION_DOCUMENTS]:
        logits(ids, recorder)
    stored = {each: Stored(model, FORMATS[each], recorder) for each in formats}
    sums: dict[str, list[tuple[float, float]]] = {each: [] for each in formats}
    counts = [len(ids) for ids in samples[CALIBRATION_DOCUMENTS:]]
    for ids in tqdm(samples[CALIBRATION_DOCUMENTS:], desc=name, unit="document", disable=None):
        exact = logits(ids, attend)
        for each in formats:
            found = logits(ids, stored[each])
            kl = (exact.exp() * (exact - found)).sum()
            sums[each].append((float(kl), float((exact.argmax(-1) == found.argmax(-1)).sum())))
    heads, dim = model.config.num_kv_heads, model.config.head_dim
    rows = []
    for each in formats:
        made, (kl_sums, same) = FORMATS[each], zip(*sums[each], strict=True)
        bits = made.bits_per_number(LLAMA_HEADS, LLAMA_DIM)
        token_bytes = {
            cut: round(2 * owners * LLAMA_HEADS * LLAMA_DIM * bits / 8) for cut, owners in LLAMA_OWNERS.items()
        }
        row = {"model": name, "format": each, "bits_per_number": bits, "llama_bytes_per_token": token_bytes}
        row |= {"bits_per_number_here": made.bits_per_number(heads, dim), "residual": made.residual}
        row |= {"num_tokens": sum(counts), "kl": asdict(bootstrap_interval(kl_sums, counts))}
        rows.append(row | {"agreement": asdict(bootstrap_interval(same, counts))})
    return rows


def measure(args: argparse.Namespace) -> Report:
    """Compare every model."""
    names, formats = args.model or MODELS, args.only or list(FORMATS)
    rows = [row for name in names for row in compare(name, formats, args.num_documents, args.length)]
    return {
        "command": "python -m perf.quality.cache_formats",
        "calibration_documents": CALIBRATION_DOCUMENTS,
        "rows": rows,
    }


LLAMA_HEADS, LLAMA_DIM, LLAMA_OWNERS = 8, 128, {"no cut": 32, "cut 16, 4-way": 20}
"""KV heads, head_dim and owners of Llama-3.1-8B, whose bytes the table gives."""


def markdown(report: dict[str, Any]) -> str:
    """Return the table with its explanation."""
    by_format: dict[str, dict[str, dict[str, Any]]] = {}
    for row in report["rows"]:
        by_format.setdefault(row["format"], {})[row["model"]] = row
    models = list(dict.fromkeys(row["model"] for row in report["rows"]))

    def first(of_models: dict[str, Any]) -> dict[str, Any]:
        return next(iter(of_models.values()))

    def token_bytes(row: dict[str, Any], cut: str) -> str:
        end = f" + {row['residual']} exact tokens" if row["residual"] else ""
        return f"{row['llama_bytes_per_token'][cut]}{end}"

    def kl(of_models: dict[str, Any], model: str) -> str | None:
        return interval(of_models[model]["kl"], 2, kind="g") if model in of_models else None

    def same(of_models: dict[str, Any], model: str) -> float | None:
        return 100 * of_models[model]["agreement"]["value"] if model in of_models else None

    columns: list[tuple] = [("format", lambda of: first(of)["format"])]
    columns.append(("bits a number", lambda of: first(of)["bits_per_number"], ".4g"))
    columns += [(f"bytes a token, {cut}", lambda of, cut=cut: token_bytes(first(of), cut)) for cut in LLAMA_OWNERS]
    for model in models:
        columns.append((f"{model}: KL, nats a token", lambda of, model=model: kl(of, model)))
        columns.append((f"{model}: same top token, %", lambda of, model=model: same(of, model), ".2f"))
    tokens = sorted({row["num_tokens"] for row in report["rows"]})
    parts = [
        "# Formats of the KV cache, simulated",
        told(report),
        f"The tiny models in float32 on {' and '.join(map(str, tokens))} tokens of documents full of questions; KL of "
        "the exact cache's distribution to each format's, with its 95% interval over documents. Bits and bytes are "
        "those of Llama-3.1-8B (8 KV heads of 128), scales included; here heads have 64 numbers, so a scale of a head "
        "weighs twice as much and helps more. Rotated: by a Hadamard matrix over head_dim. nuq4: KVQuant's keys before "
        f"RoPE and values, its limits and levels from {report['calibration_documents']} other documents, without its "
        f"weights of sensitivity. KIVI: groups of 32, of keys along tokens; exact are a query's own 32 "
        "positions, or its 64 or 128, as pages would be. Fitted: a group's range is the best of five shares of what "
        "its numbers span.",
        columns_table(
            columns, [by_format[each] for each in FORMATS if each in by_format], "l" + "r" * len(columns[1:])
        ),
    ]
    return "\n\n".join(parts) + "\n"


def plot(report: dict[str, Any], path: Path) -> None:
    """Bits against KL, a panel for each model."""
    models = list(dict.fromkeys(row["model"] for row in report["rows"]))
    with panels(path, 5.5 * len(models), 4.6, len(models), sharey=True) as found:
        for axes, name in zip(found, models, strict=True):
            for row in (row for row in report["rows"] if row["model"] == name):
                kl, bits = row["kl"], row["bits_per_number"]
                colour = "tab:red" if "rotated" in row["format"] else "tab:blue"
                errors = [[kl["value"] - kl["low"]], [kl["high"] - kl["value"]]]
                axes.errorbar([bits], [kl["value"]], yerr=errors, fmt="o", markersize=4, capsize=2, color=colour)
                axes.annotate(row["format"], (bits, kl["value"]), (4, 3), textcoords="offset points", fontsize=6.5)
            axes.set(xscale="log", yscale="log", title=name, xlabel="bits of a number of K or V, scales included")
            axes.set_xticks([2, 3, 4, 5, 6, 8, 16], labels=["2", "3", "4", "5", "6", "8", "16"], minor=False)
            axes.minorticks_off()
        found[0].set(ylabel="KL to the exact cache, nats a token")
        found[0].figure.suptitle("Formats of the KV cache, tiny models; red: rotated; 95% intervals")


EXPERIMENT = Experiment(
    "perf.quality.cache_formats", __doc__,
    options=(
        option("--model", action="append", choices=list(MODELS), help="default: all; may be given again"),
        option("--only", action="append", choices=list(FORMATS), metavar="FORMAT", help="default: all formats"),
        number("--num-documents", 48, "(default %(default)s)"),
        number("--length", 512, "tokens of a document (default %(default)s)"),
        output("OUTPUT.json, .md and .png", "perf/results/cache-formats"),
    ),
    measure=measure, merged=("model", "format"), shown=markdown, plot=plot, figure=".png",
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(EXPERIMENT.run())
