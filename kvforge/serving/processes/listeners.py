"""Which process listens on a port, from /proc."""

import contextlib
import os
from pathlib import Path

LISTEN = "0A"


def listens(pid: int, port: int) -> bool:
    """Whether the process listens on this TCP port, at whichever address; True where the system does not say."""
    try:
        sockets = {inode for name in ("tcp", "tcp6") for inode in _listening(name, port)}
        return any(inode in sockets for inode in _sockets_of(pid))
    except OSError:
        return True


def _listening(table: str, port: int) -> set[str]:
    """The inodes of the sockets in /proc/net/TABLE that listen on the port."""
    path = Path("/proc/net") / table
    if table == "tcp6" and not path.exists():  # a system without IPv6
        return set()
    rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()[1:]]
    return {row[9] for row in rows if row[3] == LISTEN and int(row[1].rpartition(":")[2], 16) == port}


def _sockets_of(pid: int) -> set[str]:
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            name = os.readlink(descriptor)
            if name.startswith("socket:["):
                found.add(name[len("socket:[") : -1])
    return found
