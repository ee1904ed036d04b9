"""The scheduler knows no tensors, and text needs no torch."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "scheduling.scheduler",
        "scheduling.page_pool",
        "scheduling.prefix_cache",
        "requests.params",
        "text.tokenizer",
        "text.detokenizer",
        "text.stream",
    ],
)
def test_module_does_not_import_torch(module: str) -> None:
    code = f"import sys, kvforge.runtime.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
