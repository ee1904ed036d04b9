"""The program that times operators knows its cases by name."""

import pytest

from perf.operators import bench


@pytest.mark.parametrize("only", [["nosuch"], ["linear", "nosuch"]])
def test_a_case_that_is_none_is_refused_by_name(only: list[str], monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(bench, "machine_rates", lambda seconds: pytest.fail("it measures"))
    monkeypatch.setattr("sys.argv", ["bench", "--only", *only])
    with pytest.raises(SystemExit) as status:
        bench.main()
    error = capsys.readouterr().err.splitlines()[-1]
    assert status.value.code == 2 and "no case is named nosuch; give some of " in error
    assert {"decode", "linear", "prefill"} <= set(error.partition("give some of ")[2].replace(",", "").split())
