"""What ``kvforge bench`` shows of drafts and early exits where there may be some."""

import json
from pathlib import Path

import pytest

from kvforge.bench.workload import measure
from kvforge.cli import main
from kvforge.runtime import LLMEngine
from tests.support.sessions.exit import ExitSession
from tests.support.sessions.fake_shadow import FakeShadowSession

WORKLOADS = {"few": {"requests": 2, "input_tokens": 12, "output_tokens": 60}}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch, capsys):
    """Runs ``kvforge bench`` on a fake engine that repeats itself; returns the lines it prints. Every run of a test
    shows what the first has measured, as the number of drafts depends on their time."""
    path = tmp_path / "workloads.json"
    path.write_text(json.dumps(WORKLOADS))

    def engine(_, kv_cache_gib, **options):
        return LLMEngine(session=ExitSession(memory=1, vocab_size=8), num_pages=64, **options)

    measured = []

    def measure_once(*arguments):
        measured.append(measured[0] if measured else measure(*arguments))
        return measured[-1]

    monkeypatch.setattr("kvforge.runtime.loading.load_engine", engine)
    monkeypatch.setattr("kvforge.commands.bench.engine_of", lambda args, predicts: (args.engine, None))
    monkeypatch.setattr("kvforge.bench.workload.measure", measure_once)

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
        (
            ["--early-exit-prompts", "--early-exit-threshold", "0.1"],
            "  early exits of prompts",
            {"early_exits": "", "prompt_early_exits": ""},
        ),
    ],
)
def test_columns(bench, arguments, titles, keys) -> None:
    head, row = bench(*arguments)
    assert head.endswith(f"combined tok/s{titles}") and len(head) == len(row)
    counts = json.loads(bench(*arguments, "--json")[0])
    expected = [format(counts.get(key, 0), form) for key, form in keys.items()]
    assert row.split()[:4] == ["few", "2", "12", "60"] and row.split()[10:] == expected
    seconds = counts["ttft_s"], counts["total_s"]
    assert counts["prompt_tok_s"] <= 24 / seconds[0] and counts["decode_tok_s"] > 120 / seconds[1] * 0.5
    assert 0 < counts["token_ms"] < 1e3 * seconds[1] / 59
    assert ("early_exits" in counts) == (arguments[-1:] in (["0.5"], ["0.1"]))
    assert counts.get("prompt_early_exits", 0) == (2 if "--early-exit-prompts" in arguments else 0)


def test_columns_of_shadowkv(bench, monkeypatch) -> None:
    def engine(_, kv_cache_gib, **options):
        return LLMEngine(session=FakeShadowSession(), num_pages=64, num_state_pages=32, **options)

    monkeypatch.setattr("kvforge.runtime.loading.load_engine", engine)
    monkeypatch.setattr("kvforge.commands.bench.engine_of", lambda args, predicts: (args.engine, None))
    head, row = bench()
    counts = json.loads(bench("--json")[0])
    assert head.endswith("combined tok/s    chunks  in place") and len(head) == len(row)
    assert row.split()[10:] == [str(counts.get("selected_chunks", 0)), format(counts.get("chunk_hit_rate", 0.0), ".1%")]
