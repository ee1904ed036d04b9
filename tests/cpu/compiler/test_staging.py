"""The output directory: whole or not there, whoever else writes it and whatever it is."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.common.staging import check_free, staging_directory
from kvforge.manifest.engine_dir import check_output


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


def test_what_may_not_be_removed_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved aside, it would stay there, and the next replacement would fail for it at its end."""
    output = tmp_path / "engine"
    write_engine(output, "first")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != output and access(path, mode))
    with pytest.raises(KvforgeError, match="engine is read-only; make it writable"):
        write_engine(output, "second", replace=True)
    assert (output / "engine.json").read_text() == "first"
    assert list(tmp_path.iterdir()) == [output]


def test_two_builds_to_one_output_in_one_process(tmp_path: Path) -> None:
    output = tmp_path / "engine"
    with staging_directory(output) as staging:
        (staging / "engine.json").write_text("first")
        with pytest.raises(KvforgeError, match=r"Another run writes to .*engine .*wait for it"):
            write_engine(output, "second")
    assert (output / "engine.json").read_text() == "first"


def test_replacing_keeps_the_old_engine_if_the_last_rename_fails(tmp_path: Path, monkeypatch) -> None:
    output = tmp_path / "engine"
    write_engine(output, "old")
    rename = Path.rename

    def fail_on_staging(self: Path, target: Path) -> Path:
        if target == output and not self.name.endswith(".replaced"):
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
    abandoned = tmp_path / ".en[gi]ne*.building"
    (abandoned / "rank0").mkdir(parents=True)
    (abandoned / "weights").write_text("half")
    (abandoned / "elsewhere").symlink_to(tmp_path)
    write_engine(tmp_path / "en[gi]ne*", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["en[gi]ne*"]
    assert [path.name for path in (tmp_path / "en[gi]ne*").iterdir()] == ["engine.json"]


def test_an_output_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "engine"
    check_output(output, overwrite=False)
    with pytest.raises(KvforgeError, match="cannot be made"):
        write_engine(output, "new")


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvforgeError, match="is not UTF-8 text; choose another output directory"):
        write_engine(tmp_path / "\udcff", "new")
    assert list(tmp_path.iterdir()) == []


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


WRITER = """
import sys, time
from pathlib import Path
from kvforge.common.staging import staging_directory
output, content = Path(sys.argv[1]), sys.argv[2]
with staging_directory(output, replace=True) as staging:
    print("began", flush=True)
    sys.stdin.readline()
    for name in ("engine.json", "weights"):
        (staging / name).write_text(content)
"""


def writer(output: Path, content: str) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, str(output), content]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_of_many_runs_at_once_one_writes_and_the_others_say_so(tmp_path: Path) -> None:
    output = tmp_path / "engine"
    first = writer(output, "first")
    assert first.stdout.readline() == "began\n"
    others = [writer(output, str(number)) for number in range(3)]
    for other in others:
        _, error = other.communicate("\n", timeout=120)
        assert error.strip().splitlines()[-1].endswith("wait for it, or choose another output directory."), error
    first.communicate("\n", timeout=120)
    assert {path.read_text() for path in output.iterdir()} == {"first"} and list(tmp_path.iterdir()) == [output]


def test_a_killed_run_is_no_other_run_whoever_has_its_process_id(tmp_path: Path) -> None:
    output = tmp_path / "engine"
    first = writer(output, "first")
    assert first.stdout.readline() == "began\n"
    first.kill()
    first.wait()
    assert not output.exists() and len(list(tmp_path.iterdir())) == 1
    write_engine(output, "second")
    assert (output / "engine.json").read_text() == "second" and list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("replace", [False, True])
def test_what_a_killed_replacement_took_away_comes_back(replace: bool, tmp_path: Path) -> None:
    """Killed between its two renames: the old engine has a hidden name, and the new one as well."""
    output = tmp_path / "engine"
    write_engine(output, "old")
    output.rename(tmp_path / ".engine.replaced")
    (tmp_path / ".engine.building").mkdir()
    if replace:
        write_engine(output, "new", replace=True)
    else:
        with pytest.raises(KvforgeError, match="is there and not empty"):
            write_engine(output, "new")
    assert (output / "engine.json").read_text() == ("new" if replace else "old")
    assert list(tmp_path.iterdir()) == [output]


def test_only_what_was_there_is_replaced(tmp_path: Path) -> None:
    """What was copied to the output meanwhile stays, as what another run made there."""
    output = tmp_path / "engine"
    write_engine(output, "old")
    with pytest.raises(KvforgeError, match="was made by another run"), staging_directory(output, replace=True):
        output.rename(tmp_path / "elsewhere")
        output.mkdir()
        (output / "engine.json").write_text("other")
    assert (output / "engine.json").read_text() == "other"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "engine"]


def test_an_output_that_is_removed_meanwhile_is_written_all_the_same(tmp_path: Path) -> None:
    output = tmp_path / "engine"
    write_engine(output, "old")
    with staging_directory(output, replace=True) as staging:
        (staging / "engine.json").write_text("new")
        shutil.rmtree(output)
    assert (output / "engine.json").read_text() == "new" and list(tmp_path.iterdir()) == [output]


def test_a_parent_that_is_removed_meanwhile_is_one_sentence(tmp_path: Path) -> None:
    output = tmp_path / "parent" / "engine"
    with pytest.raises(KvforgeError, match="was not written"), staging_directory(output) as staging:
        shutil.rmtree(output.parent)
        (staging / "engine.json").write_text("new")
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(KvforgeError, match=r"cannot be made \(Read-only file system\); choose another"):
        write_engine(tmp_path / "engine", "new")
    assert list(tmp_path.iterdir()) == []


def test_a_file_elsewhere_is_not_blamed_on_the_output(tmp_path: Path) -> None:
    other = tmp_path / "file" / "cache"
    other.parent.touch()
    engine, blamed = tmp_path / "deep" / "engine", rf"correct permissions at {other}, which is no part of it\.$"
    with pytest.raises(KvforgeError, match=blamed), staging_directory(engine):
        other.mkdir()
    with pytest.raises(KvforgeError, match=r"correct permissions there\.$"), staging_directory(engine) as staging:
        (staging / "file").touch()
        (staging / "file" / "x").mkdir()
