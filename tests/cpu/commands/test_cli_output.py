"""The command line when its output cannot be written."""

import os
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-m", "kvforge.cli", "doctor", "--json"]


def test_a_reader_that_goes_away_is_no_error_message() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(COMMAND, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_full_disk_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(COMMAND, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode != 0
    assert result.stderr.splitlines()[0] == "kvforge: error: [Errno 28] No space left on device."
    assert "Traceback" not in result.stderr
