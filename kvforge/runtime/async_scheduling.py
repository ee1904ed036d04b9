"""Which engines may plan a step while the device computes the one before, and the option for it."""

import argparse

from kvforge.common.errors import EngineError
from kvforge.kv_policies.policy import has_transitions
from kvforge.kv_policies.visibility import visibility_of
from kvforge.manifest import Manifest


def add_async_scheduling(parser: argparse.ArgumentParser) -> None:
    """Declare ``--async-scheduling``."""
    parser.add_argument(
        "--async-scheduling", action="store_true",
        help="target cuda: plan each step while the GPU computes the one before (default: after it)",
    )  # fmt: skip


def check_async_scheduling(manifest: Manifest, runs_ahead: bool, **others: object) -> None:
    """Raise EngineError unless steps of an engine can be planned ahead; with any of the ``others``, which are options
    by name, they cannot. ``runs_ahead``: its sessions do."""
    policy = manifest.policy
    if not runs_ahead:
        reason = f"target {manifest.target}, which computes a step while the engine waits"
    elif given := [name for name, value in others.items() if value is not None]:
        reason = given[0]
    elif has_transitions(policy) or policy.sealing is not None:
        reason = f"the engine's KV policy {manifest.kv_policy}, which changes a cache between steps"
    elif visibility_of(manifest.model) is not None:
        reason = "a blind cut"
    elif manifest.state_bytes:
        reason = "layers that keep a state"
    elif manifest.predicts:
        reason = "predicted prompts"
    else:
        return
    raise EngineError(f"async_scheduling does not go with {reason}; leave it out.")
