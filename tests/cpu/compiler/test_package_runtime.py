"""Packages share the process's C++ runtime: one of their own is refused where it is made, not where it is loaded."""

from pathlib import Path

import pytest
import torch
from torch._inductor import config

from kvforge.common.errors import BuildError
from kvforge.compiler.aot_inductor import compile_package

WITH_OWN_RUNTIME = """#!/bin/sh
case " $* " in *" -shared "*) exec g++ "$@" -static-libstdc++;; *) exec g++ "$@";; esac
"""


def test_a_compiler_that_puts_its_runtime_into_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(WITH_OWN_RUNTIME)
    compiler.chmod(0o755)
    program = torch.export.export(torch.nn.Linear(7, 5), (torch.randn(3, 7),))
    compile_package(program, tmp_path / "shared.pt2")
    monkeypatch.setattr(config.cpp, "cxx", (None, str(compiler)))
    monkeypatch.setattr(config, "cpp_cache_precompile_headers", False)
    with pytest.raises(BuildError, match=r"put its runtime library into own, .* set CXX"):
        compile_package(program, tmp_path / "own.pt2")
