"""Who listens on a port: a process of ours, by /proc, or anybody, by a connection."""

import contextlib
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

LISTEN = "0A"
CONNECT_TIMEOUT_S = 1.0


def listened_ports(pid: int) -> set[int] | None:
    """The TCP ports on which the process listens, at whichever address; None where the system does not say."""
    try:
        ports = _listening("tcp") | _listening("tcp6")
        return {ports[inode] for inode in _sockets_of(pid) if inode in ports}
    except OSError:
        return None


def accepts(url: str) -> bool:
    """Whether somebody takes a connection at the URL, or at HOST:PORT."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _listening(table: str) -> dict[str, int]:
    """The sockets in /proc/net/TABLE that listen: inode to port."""
    path = Path("/proc/net") / table
    if table == "tcp6" and not path.exists():  # a system without IPv6
        return {}
    rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()[1:]]
    return {row[9]: int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == LISTEN}


def _sockets_of(pid: int) -> set[str]:
    """The inodes of the process's sockets."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            name = os.readlink(descriptor)
            if name.startswith("socket:["):
                found.add(name[len("socket:[") : -1])
    return found
