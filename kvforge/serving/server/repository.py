"""The Triton model repository: where its templates are, and writing it out for one engine."""

import os
import sys
from pathlib import Path
from string import Template

from kvforge.common.errors import MissingToolError
from kvforge.manifest import TOKENIZER_DIR
from kvforge.serving.options import write_serve_file
from kvforge.serving.server.options import ServerOptions

MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")
ENGINE_LINK = "engine"
"""In the run directory, to the engine's: the stubs of Triton's Python backend know file names in ASCII alone, whatever
the locale and the environment say."""
TEXT_QUEUE_SLACK = 64
"""Requests that may wait for `preprocessing` beyond those that the engine takes, so that all but a flood are refused by
the stub, which counts them and says what is the matter."""


def repository_templates() -> Path:
    """`triton_repo/` of the source tree, or the copy inside the installed package."""
    serving = Path(__file__).resolve().parents[1]
    for candidate in (serving.parent.parent / "triton_repo", serving / "triton_repo"):
        if (candidate / "ensemble" / "config.pbtxt").is_file():
            return candidate
    raise MissingToolError("the triton_repo folder is missing from this installation: reinstall kvforge")


def materialise(target: Path, engine_dir: Path, max_batch_size: int, options: ServerOptions) -> None:
    """Write the model repository for `engine_dir` into `target`, which must not exist.

    The folder of `target` is the server's run_dir: the options that the models read (options.py), the socket between
    the text models and tensorrt_llm, the drain and state files (state_files.py), and the link by which the models read
    the engine. The models' Python finds modules where this process does: stubs of Triton's Python backend may not read
    PYTHONPATH.
    """
    templates = repository_templates()
    run_dir, link = target.parent, target.parent / ENGINE_LINK
    excludes_input = options.decoupled if options.exclude_input is None else options.exclude_input
    values = {
        "max_batch_size": str(max_batch_size),
        "engine_dir": _quoted(str(link)),
        "tokenizer_dir": _quoted(str(link / TOKENIZER_DIR)),
        "run_dir": _quoted(str(run_dir)),
        "max_open_requests": str(max_batch_size + options.max_queue_size + TEXT_QUEUE_SLACK),
        "decoupled": str(options.decoupled).lower(),
        "exclude_input_in_output": str(excludes_input).lower(),
    }
    paths = [os.fsencode(path) for path in sys.path if path]
    found = f"import os\nimport sys\n\nsys.path[:0] = map(os.fsdecode, {paths!r})\n"
    target.mkdir(parents=True)
    link.symlink_to(engine_dir)
    write_serve_file(options, run_dir)
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
