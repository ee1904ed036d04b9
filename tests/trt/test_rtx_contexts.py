"""Contexts of TensorRT for RTX as far as a machine without a GPU can tell: their settings, and kernels that are kept.

The engine is a stand-in whose methods are NVIDIA's; nothing is run.
"""

from tests.support.tensorrt.rtx import ask_rtx


def test_contexts_and_kept_kernels() -> None:
    said = ask_rtx("runtime_config", None)
    general = ["USER_MANAGED", "DISABLED", "NONE"]
    assert said["settings"] == [general, ["USER_MANAGED", "WHOLE_GRAPH_CAPTURE", "LAZY"]]
    assert said["one_cache"] and said["files"] == ["lower.nvidia-l4-x.kernels"]
    assert said["content"] == [*b"good", 0, 0] and said["unchanged"]
    assert said["replaced"] == "empty", "what TensorRT does not take is written anew"
    assert said["after_a_failure"] == "empty"
