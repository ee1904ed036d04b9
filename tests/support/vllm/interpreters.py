"""Interpreters for target ``vllm``: one that only says what it has, and this one with a vLLM that counts."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

FAKE = Path(__file__).resolve().parent / "fake"
"""Put on PYTHONPATH, it is this interpreter's vLLM."""


def telling_interpreter(folder: Path, **found: Any) -> str:
    """A program that answers ``environment.probe`` with vLLM 0.32.0 and torch 2.13.0, or with what is given."""
    told = {"python": [3, 11], "vllm": "0.32.0", "torch": "2.13.0", **found}
    path = folder / "python-with-vllm"
    path.write_text(f"#!/bin/sh\necho '{json.dumps(told)}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def counting_interpreter(folder: Path) -> str:
    """This interpreter, with the vLLM that counts; it also answers ``environment.probe``."""
    path = folder / "counting-python"
    told = json.dumps({"python": [3, 11], "vllm": "0.32.0", "torch": "2.13.0"})
    path.write_text(
        "#!/bin/sh\n"
        f"if [ \"$1\" = -c ]; then echo '{told}'; exit; fi\n"
        f'PYTHONPATH="{FAKE}:$PYTHONPATH" exec "{sys.executable}" "$@"\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)
