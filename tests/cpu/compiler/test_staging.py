"""The output directory: whole or not there, whoever else writes it and whatever it is."""

from pathlib import Path

import pytest

from kvforge.compiler.engine_dir import check_output
from kvforge.errors import KvforgeError
from kvforge.staging import check_free, staging_directory


def write_engine(output: Path, content: str, replace: bool = False) -> None:
    with staging_directory(output, replace=replace) as staging:
        (staging / "engine.json").write_text(content)


def test_a_build_never_replaces_what_another_made_meanwhile(tmp_path: Path) -> None:
    output = tmp_path / "engine"
    with pytest.raises(KvforgeError, match="another run"), staging_directory(output) as staging:
        (staging / "engine.json").write_text("late")
        output.mkdir()
        (output / "engine.json").write_text("first")
    assert (output / "engine.json").read_text() == "first"
    assert list(tmp_path.iterdir()) == [output]


def test_two_builds_to_one_output_in_one_process(tmp_path: Path) -> None:
    output = tmp_path / "engine"
    with staging_directory(output) as staging:
        (staging / "engine.json").write_text("first")
        with pytest.raises(KvforgeError, match="another run"):
            write_engine(output, "second")
    assert (output / "engine.json").read_text() == "first"


def test_replacing_keeps_the_old_engine_if_the_last_rename_fails(tmp_path: Path, monkeypatch) -> None:
    output = tmp_path / "engine"
    write_engine(output, "old")
    rename = Path.rename

    def fail_on_staging(self: Path, target: Path) -> Path:
        if target == output and not self.name.endswith(".old"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_on_staging)
    with pytest.raises(KeyboardInterrupt):
        write_engine(output, "new", replace=True)
    assert (output / "engine.json").read_text() == "old"
    assert list(tmp_path.iterdir()) == [output]


def test_an_output_that_is_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("target [1]")
    for content in ("old", "new"):
        write_engine(link, content, replace=True)
        assert link.is_symlink() and (tmp_path / "target [1]" / "engine.json").read_text() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target [1]"]


def test_abandoned_builds_are_found_whatever_the_name(tmp_path: Path) -> None:
    abandoned = tmp_path / ".en[gi]ne*.building-999999999"
    abandoned.mkdir()
    write_engine(tmp_path / "en[gi]ne*", "new")
    assert not abandoned.exists()


def test_an_output_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "engine"
    check_output(output, overwrite=False)
    with pytest.raises(KvforgeError, match="cannot be made"):
        write_engine(output, "new")


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KvforgeError, match="No space left"), staging_directory(tmp_path / "engine"):
        Path("/dev/full").write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_without_replace_only_an_empty_directory_is_written_to(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    write_engine(output, "first")
    link = tmp_path / "link"
    link.symlink_to(output)
    for taken in (output, link, output / "engine.json", tmp_path):
        with pytest.raises(KvforgeError, match="is there and not empty"):
            check_free(taken)
        with pytest.raises(KvforgeError, match="is there and not empty"):
            write_engine(taken, "second")
    assert (output / "engine.json").read_text() == "first" and link.is_symlink()
    link.unlink()
    link.symlink_to(tmp_path / "nothing yet")
    check_free(link)


def test_what_filled_an_empty_directory_meanwhile_is_kept(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    with pytest.raises(KvforgeError, match="another run"), staging_directory(output) as staging:
        (staging / "engine.json").write_text("late")
        (output / "notes").write_text("first")
    assert [path.name for path in output.iterdir()] == ["notes"] and list(tmp_path.iterdir()) == [output]
