"""The Triton model repository: where its templates are, and writing it out for one engine."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from kvforge.common.errors import MissingToolError
from kvforge.manifest import TOKENIZER_DIR

MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")
ENGINE_LINK = "engine"
"""In the run directory, to the engine's: the stubs of Triton's Python backend know file names in ASCII alone, whatever
the locale and the environment say."""
TEXT_QUEUE_SLACK = 64
"""Requests that may wait for `preprocessing` beyond those that the engine takes, so that all but a flood are refused by
the stub, which counts them and says what is the matter."""


@dataclass(frozen=True)
class RequestLimits:
    """What the models check about requests before the engine sees them, and how they log.

    `max_queue_size` requests wait beyond those that fill the engine's sequences; one more is refused with UNAVAILABLE.
    `max_request_bytes` bounds the sum of a request's input tensors. `log_format` is text or json; requests are logged
    at `log_level` INFO. Unless `decoupled`, a request has one response and may not stream. With `exclude_input` an
    answer leaves the prompt out where a request does not say. `wrap_token_ids` takes any number for a token. Responses
    of a stream have `stream_interval` tokens (parameters.py). `max_seq_len` is that of the engine's manifest where
    None. The models load no engine or tokenizer but that of `manifest_sha256`.
    """

    max_queue_size: int = 1024
    max_request_bytes: int = 16 * 2**20
    log_format: str = "text"
    log_level: str = "WARNING"
    max_seq_len: int | None = None
    manifest_sha256: str | None = None
    decoupled: bool = True
    exclude_input: bool = True
    wrap_token_ids: bool = False
    stream_interval: int = 1


def repository_templates() -> Path:
    """`triton_repo/` of the source tree, or the copy inside the installed package."""
    serving = Path(__file__).resolve().parents[1]
    for candidate in (serving.parent.parent / "triton_repo", serving / "triton_repo"):
        if (candidate / "ensemble" / "config.pbtxt").is_file():
            return candidate
    raise MissingToolError("the triton_repo folder is missing from this installation: reinstall kvforge")


def materialise(
    target: Path,
    engine_dir: Path,
    engine_command: Sequence[str],
    max_batch_size: int,
    limits: RequestLimits = RequestLimits(),
) -> None:
    """Write the model repository for `engine_dir` into `target`, which must not exist.

    The folder of `target` is the server's run_dir: the socket between the text models and tensorrt_llm goes
    there, the drain and state files (state_files.py), and the link by which the models read the engine.
    `engine_command` is the argument list of the engine process (kvforge.serving.engine.process). The models' Python
    finds modules where this process does: stubs of Triton's Python backend may not read PYTHONPATH.
    """
    templates = repository_templates()
    link = target.parent / ENGINE_LINK
    values = {
        "max_batch_size": str(max_batch_size),
        "engine_dir": _quoted(str(link)),
        "tokenizer_dir": _quoted(str(link / TOKENIZER_DIR)),
        "engine_command": _quoted(json.dumps(list(engine_command))),
        "python": _quoted(sys.executable),
        "run_dir": _quoted(str(target.parent)),
        "max_queue_size": str(limits.max_queue_size),
        "max_open_requests": str(max_batch_size + limits.max_queue_size + TEXT_QUEUE_SLACK),
        "max_request_bytes": str(limits.max_request_bytes),
        "max_seq_len": str(limits.max_seq_len or 0),
        "log_format": limits.log_format,
        "log_level": limits.log_level,
        "manifest_sha256": limits.manifest_sha256 or "",
        "decoupled": str(limits.decoupled).lower(),
        "exclude_input_in_output": str(limits.exclude_input).lower(),
        "wrap_token_ids": str(limits.wrap_token_ids).lower(),
        "stream_interval": str(limits.stream_interval),
    }
    paths = [os.fsencode(path) for path in sys.path if path]
    found = f"import os\nimport sys\n\nsys.path[:0] = map(os.fsdecode, {paths!r})\n"
    target.mkdir(parents=True)
    link.symlink_to(engine_dir)
    for model in MODELS:
        (target / model).mkdir()
        config = Template((templates / model / "config.pbtxt").read_text(encoding="utf-8")).substitute(values)
        (target / model / "config.pbtxt").write_text(config, encoding="utf-8")
        (target / model / "1").mkdir()
        source = (templates / model / "1" / "model.py").read_text(encoding="utf-8")
        (target / model / "1" / "model.py").write_text(found + source, encoding="utf-8")


def _quoted(text: str) -> str:
    """`text` as it is written between the quotes of a protobuf text-format string."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
