"""What a server leaves in the file system, and who removes it when the launcher itself was killed."""

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
GATEWAY_FOLDER = "kvforge-gateway-"
LAUNCHER_PID, RUN_DIR, SHM_PREFIX = "KVFORGE_LAUNCHER_PID", "KVFORGE_RUN_DIR", "KVFORGE_SHM_PREFIX"


@dataclass(frozen=True)
class ServerResources:
    """Of one server: its run directory and its regions in /dev/shm, all whose names begin with `shm_prefix`."""

    launcher_pid: int
    run_dir: Path
    shm_prefix: str

    def environment(self) -> dict[str, str]:
        """For the server's processes, so that the engine's knows what to remove after the launcher (watchdog.py)."""
        return {LAUNCHER_PID: str(self.launcher_pid), RUN_DIR: str(self.run_dir), SHM_PREFIX: self.shm_prefix}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "ServerResources | None":
        """None in a server that was started by hand."""
        try:
            return cls(int(environment[LAUNCHER_PID]), Path(environment[RUN_DIR]), environment[SHM_PREFIX])
        except (KeyError, ValueError):
            return None

    def remove(self) -> None:
        """Idempotent; for when no process of the server runs any more."""
        if self.shm_prefix:
            for region in SHARED_MEMORY.glob(f"{self.shm_prefix}*"):
                with contextlib.suppress(FileNotFoundError):
                    region.unlink()
        shutil.rmtree(self.run_dir, ignore_errors=True)


def remove_gateway_folder(state_file: Path | None) -> None:
    """For a gateway whose launcher was killed: remove the folder in which it was told of the server's state file."""
    if state_file is not None and state_file.parent.name.startswith(GATEWAY_FOLDER):
        shutil.rmtree(state_file.parent, ignore_errors=True)
