"""`kvforge build --recipe`: what of the recipe and of the command line reaches the build."""

from pathlib import Path
from typing import Any

import pytest

from kvforge import compiler
from kvforge.cli import main
from kvforge.common.errors import BuildError
from kvforge.compiler import BuildOptions

ASSETS = Path(__file__).resolve().parents[3] / "model_defs" / "assets"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, Path, BuildOptions]]:
    """What build_engine is called with; the build itself ends there."""
    calls: list[tuple[Path, Path, BuildOptions]] = []

    def record(checkpoint: Path, output: Path, options: BuildOptions, **_: Any) -> None:
        calls.append((checkpoint, output, options))
        raise BuildError("recorded")

    monkeypatch.setattr(compiler, "build_engine", record)
    return calls


def recipe(tmp_path: Path, **values: object) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in values.items()))
    return str(path)


def test_the_command_line_overrides_the_recipe(built: list, tmp_path: Path) -> None:
    path = recipe(
        tmp_path, checkpoint=ASSETS / "tiny-swiftkv", output="there", cut=4, group_size=2, kv_dtype="int8", page_size=8
    )
    assert main(["build", "--recipe", path]) == 1
    assert main(["build", "--recipe", path, "-o", "elsewhere", "--kv-dtype", "fp8", "--max-draft-len", "2"]) == 1
    student = ASSETS / "tiny-swiftkv"
    assert built == [
        (student, Path("there"), BuildOptions(kv_dtype="int8", page_size=8)),
        (student, Path("elsewhere"), BuildOptions(kv_dtype="fp8", page_size=8, max_draft_len=2)),
    ]


def test_without_a_recipe_nothing_changes(built: list, tmp_path: Path) -> None:
    assert main(["build", str(tmp_path), "-o", "there", "--max-num-seqs", "3"]) == 1
    assert built == [(tmp_path, Path("there"), BuildOptions(max_num_seqs=3))]


def test_a_checkpoint_the_recipe_does_not_expect_is_refused(
    built: list, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(tmp_path, output="there", cut=4, group_size=2)
    for arguments, message in (
        (["--recipe", path, str(ASSETS / "tiny-teacher")], "expects a model with cut 4, but the checkpoint has 8"),
        (["--recipe", path], "needs a checkpoint; give it, or a --recipe that names it"),
        ([str(ASSETS / "tiny-teacher")], "needs an engine directory to write (-o)"),
        (["--recipe", str(tmp_path / "none.yaml")], "cannot be read"),
    ):
        assert main(["build", *arguments]) == 1
        assert message in capsys.readouterr().err
    assert not built
