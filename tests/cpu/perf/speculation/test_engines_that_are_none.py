"""A folder that is no engine is refused before anything is measured."""

from pathlib import Path

import pytest

from kvforge.common.errors import CheckpointError
from perf.speculation import eagle, early_exit, suffix, sweep

PARSERS = {
    "eagle": eagle.EXPERIMENT.parse,
    "suffix": suffix.EXPERIMENT.parse,
    "early_exit": lambda given: early_exit.PARSER.parse_args(["draft", *given, "--json", "FILE"]),
    "sweep": sweep.PARSER.parse_args,
    "drafts of sweep": lambda given: sweep.PARSER.parse_args([*given, "--draft-engine", *given]),
}


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("found", ["there is nothing of this name", "no engine.json"])
def test_the_folder_is_named_with_exit_status_2(name: str, found: str, tmp_path: Path, capsys) -> None:
    folder = tmp_path if found == "no engine.json" else tmp_path / "nosuch"
    with pytest.raises(SystemExit) as status:
        PARSERS[name]([str(folder)])
    error = capsys.readouterr().err.splitlines()[-1]
    assert status.value.code == 2 and f"{folder} is not an engine directory ({found}); make one with: " in error


def test_early_exit_needs_an_engine(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["early_exit", "sure", "--json", "FILE"])
    with pytest.raises(SystemExit) as status:
        early_exit.main()
    assert status.value.code == 2 and "error: sure needs an engine\n" in capsys.readouterr().err


def test_texts_to_train_on_need_a_checkpoint(tmp_path: Path) -> None:
    args = eagle.EXPERIMENT.parse([str(tmp_path / "nosuch"), "--write-data", str(tmp_path / "data")])
    with pytest.raises(CheckpointError, match=r"nosuch has no tokenizer\.json"):
        eagle.write_data(args)
    assert not (tmp_path / "data").exists()
