"""Engines under many KV policies: graphs that do not know a policy's parameters serve several of them."""

import dataclasses
import os
import shutil
from pathlib import Path

from kvforge.kv_policies import parse
from kvforge.manifest import load_manifest, save_manifest


def with_parameters(engine: Path, copy: Path, policy: str) -> Path:
    """Return ``copy``, made if it is not there yet: the engine's files, with the parameters of ``policy`` in its
    manifest. The policy is the engine's own, and one whose graphs do not know them (``views_pools`` is false)."""
    if not copy.exists():
        shutil.copytree(engine, copy, copy_function=os.link)
        manifest = dataclasses.replace(load_manifest(engine), kv_policy_parameters=parse(policy).parameters)
        (copy / "engine.json").unlink()
        save_manifest(manifest, copy)
    return copy
