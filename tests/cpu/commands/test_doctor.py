"""``kvforge doctor`` names every optional package, and how to get an absent one."""

import pytest

from kvforge import doctor


def test_absent_packages_come_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    checks = {check.name: check for check in doctor._packages()}
    assert {"onnx", "onnxscript", "triton", "modelopt", "tensorrt", "transformers", "tritonclient"} <= checks.keys()
    assert all(check.found == "not installed" and check.advice for check in checks.values())
    assert checks["onnx"].advice == checks["onnxscript"].advice == "pip install -e '.[onnx]'"
    assert "CUDA build of torch" in checks["triton"].advice
