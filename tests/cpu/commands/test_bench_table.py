"""What ``kvforge bench`` shows of drafts and early exits where there may be some."""

import json
from pathlib import Path

import pytest

from kvforge.cli import main
from kvforge.runtime import LLMEngine
from tests.support.exit_session import ExitSession

WORKLOADS = {"few": {"requests": 2, "input_tokens": 9, "output_tokens": 60}}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch, capsys):
    """Runs ``kvforge bench`` on a fake engine that repeats itself; returns the lines it prints."""
    path = tmp_path / "workloads.json"
    path.write_text(json.dumps(WORKLOADS))

    def engine(_, kv_cache_gib, **options):
        return LLMEngine(session=ExitSession(memory=1, vocab_size=8), num_pages=64, **options)

    monkeypatch.setattr("kvforge.runtime.LLMEngine", engine)

    def run(*arguments: str) -> list[str]:
        assert main(["bench", "ENGINE", "--workloads", str(path), *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize(
    ("arguments", "titles", "keys"),
    [
        ([], "", {}),
        (
            ["--speculative-method", "ngram"],
            "  draft tokens  accepted  per draft",
            {"draft_tokens": "", "acceptance": ".1%", "mean_accepted_length": ".2f"},
        ),
        (["--early-exit-threshold", "0.5"], "  early exits", {"early_exits": ""}),
        (["--early-exit-threshold", "1"], "  early exits", {"early_exits": ""}),
    ],
)
def test_columns(bench, arguments, titles, keys) -> None:
    """Tokens and drafts are the same in every run, so the line of numbers says what the JSON does."""
    head, row = bench(*arguments)
    assert head.endswith(f"combined tok/s{titles}") and len(head) == len(row)
    counts = json.loads(bench(*arguments, "--json")[0])
    expected = [format(counts.get(key, 0), form) for key, form in keys.items()]
    assert row.split()[:4] == ["few", "2", "9", "60"] and row.split()[7:] == expected
    if keys and arguments[-1] != "1":
        assert counts[next(iter(keys))] > 0
