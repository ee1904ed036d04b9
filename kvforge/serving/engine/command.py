"""The engine process's command line, which depends on the engine's target."""

import sys
from pathlib import Path

from kvforge.vllm_engine.environment import in_interpreter, python_of
from kvforge.vllm_engine.settings import load_settings

MODULE = "kvforge.serving.engine.process"


def process_command(engine_dir: Path, target: str = "cpu") -> list[str]:
    """Return what runs the engine process, whose own arguments follow.

    Raises:
        EngineError: the target is vllm, and the engine's interpreter or its checkpoint is not there.
    """
    if target != "vllm":
        return [sys.executable, "-m", MODULE, str(engine_dir)]
    settings = load_settings(engine_dir)
    settings.checkpoint_in(engine_dir)
    python = python_of(engine_dir, settings.python)
    return in_interpreter(python, ["-m", MODULE, str(engine_dir), "--vllm"])
