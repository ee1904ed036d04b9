"""The environment of the contract tests is NVIDIA's API, and cannot be mistaken for a builder."""

import importlib.util

import pytest

from tests.trt import contract_environment


def test_version(trt):
    major, minor, *_ = trt.__version__.split(".")
    assert (int(major), int(minor)) >= (11, 4)


def test_no_engine_can_be_built(trt):
    if "tensorrt_bindings" not in trt.__name__:
        pytest.skip("TensorRT itself is installed here")
    with pytest.raises(TypeError):
        trt.Builder(trt.Logger())


def test_what_is_missing_is_said(monkeypatch):
    """Where the packages are not installed, the tests are skipped with this reason."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(contract_environment.platform, "machine", lambda: "x86_64")
    with pytest.raises(contract_environment.UnavailableError, match=r"kvforge\[dev\]"):
        contract_environment._load_shims()
    monkeypatch.setattr(contract_environment.platform, "machine", lambda: "aarch64")
    with pytest.raises(contract_environment.UnavailableError, match="linux x86_64 only"):
        contract_environment._load_shims()
