"""A SwiftKV student of a real model within one call on a GPU: answers, distillation by the paper's recipe, evaluation.

    python -m perf.gpu.student --prepare FOLDER          # from runs/real-model, without a GPU
    PYTHONPATH=. python -m perf.gpu.student --smollm2 FOLDER --seconds 520 --json student.json

The model is cut at half with 2-way AcrossKV and ridge init (`kvforge rewire`). It answers the prompts for
``--answer-seconds``; texts and answers are the data. The steps are as many as the time left holds, by the speed of the
first ones, and set at the first start. They run in parts. After each part the weights lie in student.safetensors
beside the report, and the report has KL, agreement and perplexity on held-out texts so far. What is under --work is
kept: the same command continues a run that was ended. Weights in FOLDER/student.safetensors are what a new run begins
with. At the end: the same on more text by kind, and the share of the cut's damage that is recovered.
"""

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.distill import DistillConfig, distill
from kvforge.distill.data import load_data
from kvforge.distill.packing import DataSettings, PackedData
from kvforge.rewire import RewireOptions, rewire_checkpoint
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.swiftkv import SwiftKVForCausalLM, load_model
from kvforge.tokenization.chat_template import ChatTemplate
from perf.gpu.machine import begin_gpu_report, device_name, gpu_parser, parse_prepared, synchronize
from perf.gpu.student_files import PLACE, Files
from perf.gpu.student_tiny import tiny_files
from perf.harness.command import run_main
from perf.harness.files import append, read_json, read_lines, write_json
from perf.harness.options import option, positive_float
from perf.real_model.closeness import means
from perf.real_model.recovery import WEIGHTS, is_new, part_ends, recovered, save_trained, student_rows
from perf.real_model.sampled import as_transformers, draw_answers

DISTILL = DistillConfig(length=1024, batch_size=64, micro_batch=8, lr=1e-3)
CALIBRATION = RewireOptions(cut=None, init="ridge")
TO_END_S = 25.0
"""Of the time, for the last evaluation and what a probe of a few steps cannot foresee."""


@dataclass(frozen=True)
class Sizes:
    """``cut`` is a share of the layers. Of each kind of held-out text ``few`` documents are read after each of
    ``num_parts`` of the run, ``many`` before and after it."""

    cut: float = 0.5
    group_size: int = 2
    at_once: int = 1024
    max_tokens: int = 256
    few: int = 4
    many: int = 24
    num_parts: int = 8
    probe_steps: int = 3
    most_steps: int = 100_000
    calibration: RewireOptions = CALIBRATION
    distill: DistillConfig = DISTILL


TINY = Sizes(
    at_once=4, max_tokens=8, few=2, many=2, num_parts=2, probe_steps=1, most_steps=4,
    calibration=replace(CALIBRATION, num_samples=2, num_tokens=32),
    distill=replace(DISTILL, length=64, batch_size=2, micro_batch=2),
)  # fmt: skip


class Run:
    """One run: its files, its folder and its report, which is written after every stage."""

    def __init__(self, options: argparse.Namespace, files: Files, sizes: Sizes, arguments: list[str] | None) -> None:
        self.options, self.files, self.sizes = options, files, sizes
        self.work: Path = options.work
        self.work.mkdir(parents=True, exist_ok=True)
        self.deadline = time.monotonic() + options.seconds
        self.report: dict[str, Any] = {
            **begin_gpu_report("perf.gpu.student", arguments), "machine": device_name(options.device),
            "model": files.checkpoint.name, "stages": [], "curve": read_json(self.work / "curve.json", []),
        }  # fmt: skip
        self.rewired = self.work / "rewired"

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any]]:
        """Measure a stage; what it found goes into what this yields, and with its seconds into the report."""
        start, found = time.monotonic(), {}
        yield found
        synchronize(self.options.device)
        row = {"stage": name, "seconds": round(time.monotonic() - start, 1), **found}
        self.report["stages"].append(row)
        self.write()
        print(json.dumps(row), flush=True)

    def write(self) -> None:
        """Write the report so far."""
        if self.options.json:
            write_json(self.options.json, self.report)

    def all(self) -> None:
        """Do what is left of the run."""
        with self.stage("rewire"):
            self._rewire()
        with self.stage("answers") as found:
            found |= self._answer()
        with self.stage("load") as found:
            model, data, told = self._load()
            found |= told
        with self.stage("evaluation before") as found:
            self.report["before"] = read_json(self.work / "before.json", None) or self._evaluate(model, self.sizes.many)
            write_json(self.work / "before.json", self.report["before"])
        with self.stage("distillation") as found:
            found |= self._distil(model, data)
        with self.stage("evaluation after"):
            self.report["after"] = self._evaluate(model, self.sizes.many)
            first, last = (means(self.report[when])[0] for when in ("before", "after"))
            self.report["recovered"] = recovered(first, last)

    def _rewire(self) -> None:
        if not self.rewired.exists():
            source = self.files.checkpoint
            cut = int(read_model_config(open_model(source)).num_layers * self.sizes.cut)
            options = replace(self.sizes.calibration, cut=cut, group_size=self.sizes.group_size)
            rewire_checkpoint(source, self.rewired, options, calibration=self.files.train / "wiki.txt")

    def _answer(self) -> dict[str, Any]:
        """Answer prompts, batch by batch, until the time for it is over or all are answered."""
        file = self.work / "answers.jsonl"
        rows = read_lines(self.files.train / "prompts.jsonl")
        done, tokens, start = len(read_lines(file)), 0, time.monotonic()
        if (self.work / "plan.json").exists() or done >= len(rows):
            return {"num_answers": done, "num_prompts": len(rows)}
        template, tokenizer = ChatTemplate.from_dir(self.rewired), Tokenizer.from_dir(self.rewired)
        assert template is not None and tokenizer is not None  # of a chat model
        checkpoint = open_model(self.files.checkpoint)
        model = as_transformers(checkpoint, self.options.device, torch.bfloat16)
        ends = checkpoint.hf_config["eos_token_id"]
        ends = ends if isinstance(ends, list) else [ends]
        while done < len(rows) and time.monotonic() - start < self.options.answer_seconds:
            group = rows[done : done + self.sizes.at_once]
            asked = [template.render(row["messages"], add_generation_prompt=True) for row in group]
            prompts = [tokenizer.encode(text, add_special_tokens=False) for text in asked]
            for row, ids in zip(group, draw_answers(model, prompts, ends, self.sizes.max_tokens, done), strict=True):
                answer = {"role": "assistant", "content": tokenizer.decode(ids)}
                append(file, {"messages": [*row["messages"], answer]})
                tokens += len(ids)
            done += len(group)
        seconds = time.monotonic() - start
        return {"num_answers": done, "num_prompts": len(rows), "tokens": tokens, "tokens_per_s": tokens / seconds}

    def _load(self) -> tuple[SwiftKVForCausalLM, PackedData, dict[str, Any]]:
        """Return teacher and student, and the data: texts and answers."""
        data = self.work / "data.jsonl"
        if not data.exists():
            parts = [self.files.train / "texts.jsonl", self.work / "answers.jsonl"]
            data.write_bytes(b"".join(part.read_bytes() for part in parts))
        checkpoint, config = open_model(self.rewired), self.sizes.distill
        sizes = read_model_config(checkpoint)
        model = load_model(checkpoint, sizes, torch.bfloat16, with_teacher=True)
        told: dict[str, Any] = {"started_from_weights": self.files.weights.exists()}
        if self.files.weights.exists():
            model.load_state_dict(load_file(self.files.weights), strict=False)
        packed, report = load_data(data, self.rewired, sizes.vocab_size, DataSettings(config.length))
        return model.to(self.options.device), packed, {**told, "data": asdict(report)}

    def _distil(self, model: SwiftKVForCausalLM, data: PackedData) -> dict[str, Any]:
        """Train in parts, evaluating after each, as long as the time holds the next."""
        config, training = self._planned(model, data), self.work / "training"
        total = config.max_steps or 1
        seen = [row["step"] for row in self.report["curve"]]
        state, part_s = None, 0.0
        for end in part_ends(total, self.sizes.num_parts):
            if end in seen and end != total:
                continue
            if state is not None and time.monotonic() + part_s > self.deadline:
                print(f"no time for the part that ends with step {end}; the same command continues", flush=True)
                break
            start = time.monotonic()
            state = distill(config, model, data, training, progress=False, stop_after=end)
            self._keep(model, asdict(state))
            part_s = time.monotonic() - start
        done = {} if state is None else {"steps": state.step, "tokens": state.tokens, "training_s": state.seconds}
        return {"config": config.identity(), "total_steps": total, **done}

    def _planned(self, model: SwiftKVForCausalLM, data: PackedData) -> DistillConfig:
        """Return the configuration with the steps that the time holds, measured in a run that is thrown away."""
        plan, config = self.work / "plan.json", replace(self.sizes.distill, device=self.options.device)
        if not plan.exists():
            first = {name: p.detach().clone() for name, p in model.named_parameters() if is_new(name, model)}
            probe, seconds = self.work / "probe", []
            shutil.rmtree(probe, ignore_errors=True)
            steps = replace(config, max_steps=1 + self.sizes.probe_steps)
            distill(steps, model, data, probe, progress=False, on_step=lambda row: seconds.append(row["seconds"]))
            shutil.rmtree(probe)
            model.load_state_dict(first, strict=False)
            each = (seconds[-1] - seconds[0]) / self.sizes.probe_steps  # the first one also warms up
            fitting = int((self.deadline - time.monotonic() - TO_END_S) / each)
            write_json(plan, {"max_steps": max(1, min(fitting, self.sizes.most_steps)), "seconds_per_step": each})
        return replace(config, max_steps=read_json(plan, {})["max_steps"])

    def _keep(self, model: SwiftKVForCausalLM, progress: dict[str, Any]) -> None:
        """Write the trained weights, and the point of the curve that a part has reached."""
        save_trained(model, (self.options.json.parent if self.options.json else self.work) / WEIGHTS)
        rows = self._evaluate(model, self.sizes.few)
        row = {name: progress[name] for name in ("step", "tokens", "seconds")}
        row |= {
            "training": progress["metrics"],
            **{key: means(rows)[0][key] for key in ("kl", "agreement", "perplexity")},
        }
        self.report["curve"] = [old for old in self.report["curve"] if old["step"] != row["step"]] + [row]
        write_json(self.work / "curve.json", self.report["curve"])
        self.write()
        print(json.dumps(row), flush=True)

    def _evaluate(self, model: SwiftKVForCausalLM, num_documents: int) -> list[dict[str, Any]]:
        """Return a row of closeness for each kind of held-out text."""
        tokenizer = Tokenizer.from_dir(self.rewired)
        assert tokenizer is not None
        length, device = self.sizes.distill.length, self.options.device
        return student_rows(model, tokenizer, self.files.held_out, num_documents, length, device)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    told = "for the model's own answers (default %(default)g)"
    parser = gpu_parser(
        __doc__, "student", "texts",
        option("--seconds", type=positive_float, default=520.0, help="for all of it (default %(default)g)"),
        option("--answer-seconds", type=positive_float, default=120.0, help=told),
    )  # fmt: skip
    return parse_prepared(parser, arguments, "smollm2", f"copy model, texts and prompts from {PLACE.name}; no GPU")


def main(arguments: list[str] | None = None) -> int:
    """Prepare, or make a student."""
    options = parse_arguments(arguments)
    if options.prepare is not None:
        Files(PLACE).copy_to(options.prepare)
        return 0
    files = tiny_files(options.work / "files") if options.tiny else Files(options.smollm2)
    files.all  # noqa: B018 -- what is missing is named now
    run = Run(options, files, TINY if options.tiny else Sizes(), arguments)
    run.all()
    run.write()
    return 0


if __name__ == "__main__":
    raise SystemExit(run_main(main))
