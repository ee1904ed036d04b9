"""The operator tests once more, with kernels compiled for the address and undefined-behaviour sanitizers.

The sanitizers' library has to be loaded before Python, so the tests run in a process of their own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import plugins
from kvforge.common.cxx import find_cxx
from plugins import build

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# One block of the random cases, the tables of wrong arguments, and what reads or writes unusual places.
SELECTED = (
    "(block0 and not onnx) or refuses or nothing_to_do or not_finite or strided or every_value or views "
    "or not_numbers or large"
)


def sanitizer_libraries() -> list[str]:
    """The run-time libraries that must be loaded first; none where the compiler has no sanitizers."""
    compiler = find_cxx()
    if compiler is None:
        return []
    found = []
    for name in ("libasan.so", "libubsan.so"):
        command = [compiler, f"-print-file-name={name}"]
        path = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        if not path.is_absolute():
            return []
        found.append(str(path.resolve()))
    return found


@pytest.fixture(scope="module")
def sanitized() -> dict[str, str]:
    """The environment of a process whose memory is checked."""
    libraries = sanitizer_libraries()
    if not libraries:
        pytest.skip("the compiler has no address sanitizer (Debian, Ubuntu: apt install libasan8 libubsan1)")
    return os.environ | {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:exitcode=99",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture(scope="module")
def checked_operators(sanitized, isas) -> Path:
    return build.build_library(extra_flags=build.SANITIZE, isas=isas)


@pytest.mark.timeout(1800)  # compiling every kernel takes 600 core-seconds on a slow machine
def test_the_kernels_touch_no_memory_that_is_not_theirs(sanitized, checked_operators):
    files = [str(HERE / f"test_{name}.py") for name in ("every_backend", *plugins.OPERATORS)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-s"]
    result = subprocess.run(
        [*command, "-k", SELECTED, *files],
        env=sanitized | {"KVFORGE_TEST_LIBRARY": str(checked_operators)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, finding(result.stdout + result.stderr)
    assert "Sanitizer" not in result.stderr and "runtime error" not in result.stderr
    counts = re.search(r"(\d+) passed(?:, \d+ skipped)?, \d+ deselected in", result.stdout)
    assert counts is not None and int(counts[1]) > 150, result.stdout[-2000:]


def finding(output: str) -> str:
    """The first report of a sanitizer, else the end of the output."""
    report = re.search(r"(ERROR: \w+Sanitizer|runtime error)", output)
    return output[-4000:] if report is None else output[max(0, report.start() - 300) :][:4000]


PLANTED = """
#include <cstdint>
extern "C" __attribute__((visibility("default"))) void sum_into(float* x, int64_t count) {
  for (int64_t i = 0; i <= count; ++i) x[0] += x[i];  // one too many
}
"""
CALL = """
import ctypes, sys, torch
x = torch.ones(1000)
for count in (999, 1000):
    ctypes.CDLL(sys.argv[1]).sum_into(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(count))
    print(count, flush=True)
"""


def test_an_overflow_of_one_element_is_found(sanitized, tmp_path):
    source, library = tmp_path / "planted.cpp", tmp_path / "planted.so"
    source.write_text(PLANTED)
    subprocess.run(
        [build.find_compiler(), *build.FLAGS, *build.SANITIZE, "-shared", str(source), "-o", str(library)], check=True
    )
    result = subprocess.run([sys.executable, "-c", CALL, str(library)], env=sanitized, capture_output=True, text=True)
    assert result.returncode == 99 and result.stdout == "999\n", result.stderr[-3000:]
    assert "heap-buffer-overflow" in result.stderr and "sum_into" in result.stderr
