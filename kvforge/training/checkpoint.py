"""Training state on disk, written so that an interrupted write never replaces a good file."""

import os
from pathlib import Path
from typing import Any

import torch


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Writes `state` with torch.save to a temporary file, then renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_state(path: Path) -> dict[str, Any] | None:
    """The saved state, or None when there is none yet."""
    if not path.exists():
        return None
    return torch.load(path, map_location="cpu", weights_only=True)
