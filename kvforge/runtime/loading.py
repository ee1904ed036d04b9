"""The one place that chooses what runs an engine directory: our engine, or another one with its methods."""

import importlib
from pathlib import Path
from typing import Any

from kvforge.manifest import target_of
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.interface import Engine

_ENGINES = {"vllm": ("kvforge.serving.engine.remote", "RemoteEngine")}
"""By target: module and class, imported when it is chosen."""


def load_engine(engine_dir: str | Path | None = None, **options: Any) -> Engine:
    """Return the engine of a directory, with the keyword arguments of ``LLMEngine``.

    Raises:
        EngineError: it cannot be loaded, or an option is not its target's.
    """
    target = None if engine_dir is None else target_of(engine_dir)
    if target in _ENGINES:
        module, name = _ENGINES[target]
        engine: Engine = getattr(importlib.import_module(module), name)(engine_dir, **options)
        return engine
    return LLMEngine(engine_dir, **options)
