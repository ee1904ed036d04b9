"""Engines that a program builds and loads by their folders, as eager sessions: of what is built there is no more in a
folder than the tokenizer."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from kvforge.compiler import BuildOptions
from kvforge.evaluation import engine as evaluation
from kvforge.manifest import TOKENIZER_DIR
from kvforge.runtime import engine as runtime
from kvforge.runtime import loading
from perf.harness import policy_engines
from tests.support.sessions.eager import EagerSession, eager_session


def without_builds(monkeypatch: pytest.MonkeyPatch, *programs: ModuleType) -> dict[Path, EagerSession]:
    """Have ``programs`` build such engines; returns their sessions, as they come."""
    sessions, built = dict[Path, EagerSession](), dict[Path, tuple[Path, BuildOptions]]()

    def cached_engine(engine: Path, checkpoint: Path, options: BuildOptions) -> Path:
        if engine not in sessions:
            sessions[engine], built[engine] = eager_session(checkpoint, options), (checkpoint, options)
            (engine / TOKENIZER_DIR).mkdir(parents=True)
            shutil.copy(checkpoint / "tokenizer.json", engine / TOKENIZER_DIR)
        return engine

    def with_parameters(engine: Path, copy: Path, policy: str) -> Path:
        checkpoint, options = built[engine]
        return cached_engine(copy, checkpoint, replace(options, kv_policy=policy))

    for module in (policy_engines, *programs):
        monkeypatch.setattr(module, "cached_engine", cached_engine)
        monkeypatch.setattr(module, "with_parameters", with_parameters)
    for module in (runtime, evaluation, *programs):
        monkeypatch.setattr(module, "load_manifest", lambda engine: sessions[Path(engine)].manifest, raising=False)
    monkeypatch.setattr(runtime, "load_session", lambda engine, manifest: sessions[engine])
    monkeypatch.setattr(loading, "target_of", lambda engine: "cpu")
    return sessions
