"""No guide kills the process or holds it for long."""

import json
import subprocess
import sys

import pytest

from tests.support.hostile.guides import hostile_guides

pytest.importorskip("llguidance")


def test_hostile_guides_are_judged_or_refused():
    command = [sys.executable, "-m", "tests.support.hostile.guides"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-2000:]
    results = {name: result for name, _, result, _ in map(json.loads, done.stdout.splitlines())}
    assert list(results) == [name for name, _, _ in hostile_guides()]
    for name, result in results.items():
        assert result == "accepted" or (result.endswith(".") and "\n" not in result and len(result) < 450), name
    for name in ("references 1500", "rules 3500", "terminals 3500", "gbnf 2500", "large multipleOf", "two multipleOf",
                 "embedded", "embedded spelt", "embedded late", "embedded references 1500",
                 "reasoning and braces", "reasoning nested", "reasoning in reasoning"):  # fmt: skip
        assert results[name] != "accepted", name
    for name in ("references 499", "rules 998", "values", "many words", "long value", "embedded references 399",
                 "embedded colons", "reasoning", "reasoning of a budget"):  # fmt: skip
        assert results[name] == "accepted", name
