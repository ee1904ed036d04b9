"""Packages that a bare GPU machine lacks, as folders for its PYTHONPATH."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from kvforge.common.errors import KvforgeError

PYTHON, PLATFORMS = "3.12", ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64")
"""Of the machines that are lent."""


def unpack_wheels(requirements: tuple[str, ...], folder: Path) -> None:
    """Download wheels for the machines that are lent and unpack them into ``folder``.

    Raises:
        KvforgeError: pip found no such wheel.
    """
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    target = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *platforms]
    with tempfile.TemporaryDirectory(prefix="kvforge-") as downloads:
        command = [sys.executable, "-m", "pip", "download", "--quiet", *target, "--dest", downloads, *requirements]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            last = (done.stdout.strip().splitlines() or ["no message"])[-1]
            raise KvforgeError(f"pip could not download {' '.join(requirements)} ({last}); is a package index reached?")
        for wheel in sorted(Path(downloads).glob("*.whl")):
            with zipfile.ZipFile(wheel) as files:
                files.extractall(folder)
