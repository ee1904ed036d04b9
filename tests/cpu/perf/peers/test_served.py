"""What is reported of servers side by side, and what cannot be asked for."""

import pytest

from perf.harness.tables import columns_table
from perf.peers.served import COLUMNS, EXPERIMENT, make_report
from perf.peers.systems import CUT_4WAY, NO_CUT, VLLM


def run(index: int, system: str, speed: float, **more: float) -> dict:
    times = {"combined_tok_s": speed, "ttft_s": 1 / speed, "tpot_s": 2 / speed}
    return {"round": index, "system": system, "concurrency": 8, **times, **more}


def test_ratios_are_of_the_same_round_and_cpu_time_is_told_where_all_rounds_have_it() -> None:
    lines = [{"command": "c", "machine": "m"}]
    for index, factor in enumerate((1.0, 10.0, 2.0)):  # the machine is faster in one round than in another
        lines += [run(index, VLLM, 100 * factor, cpu_s=8.0), run(index, NO_CUT, 150 * factor, cpu_s=6.0)]
    report = make_report(lines)
    theirs, ours = report["rows"]
    assert (report["command"], theirs["system"], ours["rounds"]) == ("c", VLLM, 3)
    assert ours["combined_tok_s"] == 300 and ours["times_vllm"] == pytest.approx(1.5)
    assert ours["ttft_of_vllm"] == pytest.approx(1 / 1.5)
    assert (ours["cpu_s"], ours["cpu_of_vllm"]) == (6.0, 0.75)
    older = make_report([*lines, run(3, VLLM, 100), run(3, NO_CUT, 150)])["rows"][1]
    assert "cpu_s" not in older and older["cpu_of_vllm"] == 0.75 and older["rounds"] == 4
    assert columns_table(COLUMNS, [older]).count("\n") == 2


def test_a_given_model_is_there_and_has_no_cut(tmp_path, capsys) -> None:
    given = ["--checkpoint", str(tmp_path / "model.gguf"), "--systems"]
    for system, told in ((NO_CUT, "model.gguf is not there"), (CUT_4WAY, "leave them out of --systems")):
        with pytest.raises(SystemExit):
            EXPERIMENT.run([*given, system])
        assert told in capsys.readouterr().err
