"""Contexts of TensorRT for RTX as far as a machine without a GPU can tell: their settings, and kernels that are kept.

The engine is a stand-in whose methods are NVIDIA's; nothing is run.
"""

from pathlib import Path

import pytest

from kvforge.tensorrt.kept_file import write_kept
from tests.support.tensorrt.rtx import ask_rtx


def test_contexts_and_kept_kernels() -> None:
    said = ask_rtx("runtime_config", None)
    general = ["USER_MANAGED", "DISABLED", "NONE"]
    assert said["settings"] == [general, ["USER_MANAGED", "WHOLE_GRAPH_CAPTURE", "LAZY"]]
    assert said["one_cache"] and said["files"] == ["lower.nvidia-l4-x.kernels"]
    assert said["content"] == [*b"good", 0, 0] and said["unchanged"]
    assert said["replaced"] == "empty", "what TensorRT does not take is written anew"
    assert said["after_a_failure"] == "empty"


def test_a_kept_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "folder" / "kernels"
    write_kept(file, b"one")
    write_kept(file, b"two")
    assert file.read_bytes() == b"two"

    def fail(*names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_kept(file, b"three")
    assert file.read_bytes() == b"two" and [path.name for path in file.parent.iterdir()] == ["kernels"]
