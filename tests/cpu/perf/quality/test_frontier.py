"""Which compositions are on the frontier, and how those that are refused are told."""

from perf.quality.frontier import EXPERIMENT, NO_CUT, REAL, TINY, with_shares


def row(name, kl, read_bytes, prompt_flops, correct=0.5):
    estimate = {"value": kl, "low": kl, "high": kl}
    return {
        "name": name,
        "model": NO_CUT,
        "num_tokens": 256,
        "kl": estimate,
        "agreement": {"value": 0.9, "low": 0.8, "high": 1.0},
        "accuracy": {"accuracy": correct, "low": 0.0, "high": 1.0},
        "read_bytes": read_bytes,
        "prompt_flops": prompt_flops,
        "kept_bytes_per_token": read_bytes,
        "tokens_per_step": 1.0,
        "first_token": 1.0,
    }


def test_compositions_are_unique_and_the_first_is_what_others_are_measured_against():
    for cells in (TINY, REAL):
        assert len({cell.name for cell in cells}) == len(cells)
        assert cells[0].model == cells[0].name == NO_CUT


def test_who_is_as_good_nowhere_and_better_somewhere_is_not_on_the_frontier():
    rows = [row("a", 0.0, 100, 40), row("b", 0.1, 50, 20, 0.4), row("c", 0.1, 60, 20), row("d", 0.2, 50, 10)]
    refused = {"name": "e", "model": NO_CUT, "refused": "x does not go with y"}
    found = with_shares(rows, [*rows, refused])
    assert [one.get("is_best") for one in found] == [True, True, False, True, None]
    assert [one["read"] for one in rows] == [1.0, 0.5, 0.6, 0.5]
    assert [one["prompt"] for one in rows] == [1.0, 0.5, 0.5, 0.25] and rows[1]["share"] == 0.8


def test_the_report_has_the_sentence_of_what_is_refused(tmp_path):
    rows = [row("a", 0.0, 100, 40), row("b", 0.1, 50, 20)]
    refused = {"name": "e", "model": NO_CUT, "refused": "x does not go with y"}
    report = {"command": "c", "length": 8, "num_documents": 1, "num_prompts": 1, "rows": with_shares(rows, rows)}
    report["rows"] = [*report["rows"], refused]
    told = EXPERIMENT.show(report)
    assert "- e: x does not go with y" in told and "| **a** | 0.0000 (0.0000 to 0.0000) |" in told
    assert "| e |  |" in told
    EXPERIMENT.plot(report, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 1000
