"""Engines of one checkpoint for several targets, loaded once per process."""

import dataclasses
from functools import lru_cache
from pathlib import Path

from kvforge.manifest import load_manifest
from kvforge.runtime.sessions.session import Session, load_session
from tests.support.models.engines import EngineSpec
from tests.support.models.shelf import EngineShelf


@lru_cache
def session_of(path: Path) -> Session:
    """Return the session of an engine."""
    return load_session(path, load_manifest(path))


def on(spec: EngineSpec, target: str) -> EngineSpec:
    """Return the specification for another target."""
    return dataclasses.replace(spec, options=dataclasses.replace(spec.options, target=target))


def session_on(engines: EngineShelf, spec: EngineSpec, target: str) -> Session:
    """Return the session of an engine that is built if it is not there."""
    return session_of(engines.engine(on(spec, target)))
