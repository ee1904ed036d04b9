"""The environment of the contract tests is NVIDIA's API, and cannot be mistaken for a builder."""

import pytest


def test_version(trt):
    major, minor, *_ = trt.__version__.split(".")
    assert (int(major), int(minor)) >= (11, 4)


def test_no_engine_can_be_built(trt):
    if "tensorrt_bindings" not in trt.__name__:
        pytest.skip("TensorRT itself is installed here")
    with pytest.raises(TypeError):
        trt.Builder(trt.Logger())
