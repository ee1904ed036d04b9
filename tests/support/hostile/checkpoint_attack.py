"""A process with little memory that takes damaged checkpoints as every command does.

    echo CHECKPOINT SEED NUMBER... | python -m tests.support.hostile.checkpoint_attack

Each line of its input names a checkpoint. For each mutation of it the process prints a line of JSON: what was wrong,
and what each reader made of it, a sentence or "".
"""

import contextlib
import json
import random
import resource
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from kvforge.checkpoint.copy_files import copy_files
from kvforge.common.errors import KvforgeError
from kvforge.compiler import BuildOptions, build_engine
from kvforge.compiler.export import EXPORTS, ExportedGraph
from kvforge.compiler.options import ResolvedOptions
from kvforge.compiler.targets import cpu
from kvforge.distill.run import _open as open_to_distill
from kvforge.planning.load import load_subject
from kvforge.quantize.export import _open as open_to_quantize
from kvforge.rewire import RewireOptions, rewire_checkpoint
from kvforge.runtime import LLMEngine, SamplingParams
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.tokenization.chat_template import ChatTemplate
from model_defs import ModelConfig
from tests.support.hostile.checkpoint_mutations import mutation
from tests.support.sessions.eager import eager_session

MEMORY = 3 << 30
"""Bytes that a command may have beyond what Python and torch map."""


OPTIONS = BuildOptions(max_num_tokens=16, max_num_seqs=2)


def generate(path: Path, output: Path) -> None:
    """Generate with the graphs as torch runs them."""
    session = eager_session(path, OPTIONS)
    length = min(16, session.manifest.max_seq_len)
    if length == 1:
        return  # no token follows a prompt
    engine, prompt = LLMEngine(session=session, max_seq_len=length), [3, 4, 5, 6, 7][: length - 1]
    engine.add_request("a", prompt, SamplingParams(temperature=0.0, max_tokens=min(4, length - len(prompt))))
    while engine.has_unfinished():
        for result in engine.step():
            if result.finish_reason == "error":
                raise KvforgeError(str(result.stop_reason) + ".")


def rewire(path: Path, output: Path) -> None:
    rewire_checkpoint(path, output / "rewired", RewireOptions(cut=1, group_size=1, init="fold"))


READERS: dict[str, Callable[[Path, Path], object]] = {
    "build": lambda path, output: build_engine(path, output / "engine", OPTIONS),
    "generate": generate,
    "tokenizer": lambda path, output: Tokenizer.from_dir(path),
    "template": lambda path, output: ChatTemplate.from_dir(path),
    "plan": lambda path, output: load_subject(str(path)),
    "rewire": rewire,
    "distill": lambda path, output: open_to_distill(path),
    "quantize": lambda path, output: open_to_quantize(path),
}


def attempt(reader: Callable[[Path, Path], object], path: Path) -> str:
    """Return the sentence that ``reader`` refuses with, ``""`` where it takes the checkpoint; what is no refusal begins
    with ``FAILED``."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder)
        try:
            reader(path, output)
        except KvforgeError as error:
            left = [file.name for file in output.iterdir()]
            return f"{error}" if not left else f"FAILED: left {left}"
        except BaseException as error:  # what no boundary may let through
            return f"FAILED: {type(error).__name__}: {error}"
    return ""


def attack(checkpoint: Path, seed: int, numbers: Iterable[int]) -> None:
    """Run mutations of a seed."""
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    whole = {name: attempt(READERS[name], checkpoint) for name in ("build", "generate", "rewire", "quantize")}
    assert not any(answer and "kvforge does not rewire" not in answer for answer in whole.values()), whole
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, most))
    for number in numbers:
        what, apply = mutation(random.Random(seed * 10**6 + number))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "checkpoint"
            path.mkdir()
            copy_files(checkpoint, path)
            for file in ("config.json", "model.safetensors"):
                shutil.copyfile(checkpoint / file, path / file)
            apply(path)
            found = {name: attempt(reader, path) for name, reader in READERS.items()}
        print(json.dumps({"number": number, "what": what, "found": found}), flush=True)


def remembered(export: Callable[..., ExportedGraph]) -> Callable[..., ExportedGraph]:
    """An export that is done once for equal models: most mutations leave the model as it was, or refuse it before."""
    done: dict[str, ExportedGraph] = {}

    def exported(config: ModelConfig, options: ResolvedOptions) -> ExportedGraph:
        key = repr((config, options))
        if key not in done:
            done[key] = export(config, options)
        return done[key]

    return exported


def main() -> None:
    """Attack each checkpoint that a line of the input names."""
    torch.set_num_threads(1)
    for name, export in EXPORTS.items():
        EXPORTS[name] = remembered(export)
    cpu.package_writer = lambda: contextlib.nullcontext(lambda program, path: path.write_bytes(b""))
    cpu.build_library = lambda path: path.write_bytes(b"")
    for line in sys.stdin:
        checkpoint, seed, *numbers = shlex.split(line)
        attack(Path(checkpoint), int(seed), map(int, numbers))


if __name__ == "__main__":
    main()
