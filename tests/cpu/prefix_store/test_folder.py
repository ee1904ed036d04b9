"""Pages in files: what is read back is what was written, or nothing; whatever became of disk, file and writer."""

import errno
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from kvforge.cli import main
from kvforge.common.errors import EngineError
from kvforge.prefix_store import folder as module
from kvforge.prefix_store.folder import EngineFolder, page_entries
from kvforge.prefix_store.inventory import list_prefixes, load_prefixes
from kvforge.prefix_store.page_file import HEADER, PageName
from tests.support.random_cases import Seeds

KEY, SIZE = b"k" * 16, 1000
FILE = HEADER.size + SIZE


def opened(root: Path, num_pages: float = 100, key: bytes = KEY) -> EngineFolder:
    return EngineFolder(root, key, {"model": "none"}, int(num_pages * FILE))


def digest(index: int) -> bytes:
    return index.to_bytes(16, "little")


def content(index: int) -> bytes:
    return random.Random(index).randbytes(SIZE)


def write(folder: EngineFolder, index: int, priority: int = 35) -> bool:
    return folder.write(digest(index), priority, memoryview(content(index)))


def read(folder: EngineFolder, index: int) -> bool:
    """Whether a page is there; if it is, it must be right."""
    found = memoryview(bytearray(SIZE))
    there = folder.read(digest(index), found)
    assert not there or bytes(found) == content(index)
    return there


def file_of(folder: EngineFolder, index: int) -> Path:
    return folder.path / str(PageName(digest(index), 35))


def test_what_is_written_is_read_and_private(tmp_path: Path) -> None:
    folder = opened(tmp_path / "new" / "pages")
    assert all(write(folder, index) for index in range(3))
    for other in (folder, opened(tmp_path / "new" / "pages")):
        assert [read(other, index) for index in range(4)] == [True, True, True, False]
    assert {path.stat().st_mode & 0o777 for path in folder.path.iterdir()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (folder.path, folder.path.parent)} == {0o700}
    assert not list(folder.path.glob("*.tmp"))
    assert not read(opened(tmp_path / "new" / "pages", key=b"o" * 16), 0)


def test_a_torn_or_altered_file_is_removed(tmp_path: Path, seeds: Seeds, caplog: pytest.LogCaptureFixture) -> None:
    for at in [*range(HEADER.size), *seeds(40, FILE)]:
        for change in ("cut", "flip", "longer"):
            folder = opened(tmp_path)
            assert write(folder, 1)
            data = bytearray(file_of(folder, 1).read_bytes())
            data = {"cut": data[:at], "flip": data, "longer": data + b"x"}[change]
            if change == "flip":
                data[at] ^= 1 << at % 8
            file_of(folder, 1).write_bytes(data)
            caplog.clear()
            assert not read(folder, 1), (at, change)
            assert not file_of(folder, 1).exists() and digest(1) not in folder
            assert not read(folder, 1) and len(caplog.records) == 1
            assert write(folder, 1) and read(folder, 1)


def test_a_file_under_another_name_or_of_another_engine_is_not_taken(tmp_path: Path) -> None:
    folder, other = opened(tmp_path), opened(tmp_path, key=b"o" * 16)
    assert write(folder, 1)
    shutil.copy(file_of(folder, 1), file_of(folder, 2))
    shutil.copy(file_of(folder, 1), file_of(other, 1))
    for fresh, index in ((opened(tmp_path), 2), (opened(tmp_path, key=b"o" * 16), 1)):
        assert digest(index) in fresh and not read(fresh, index)


@pytest.mark.parametrize(("said", "model"), [
    ("[" * 200_000, None),
    ('{"model": "\\u001b[31m", "page_size": "x"}', None), ('{"model": "m", "page_size": "x"}', "m"),
])  # fmt: skip
def test_what_an_archive_says_of_an_engine_is_not_trusted(tmp_path: Path, said: str, model: str | None) -> None:
    folder = opened(tmp_path)
    assert write(folder, 1)
    (folder.path / "about.json").write_text(said)
    assert [engine.about for engine in list_prefixes(tmp_path)] == [{} if model is None else {"model": model}]


def test_pages_may_be_read_while_others_are_looked_for(tmp_path: Path) -> None:
    class Busy(dict[bytes, float]):
        """The reader notes a use while the writer goes through the uses."""

        def items(self):  # type: ignore[no-untyped-def, override]
            for item in super().items():
                self[digest(9)] = 0.0
                yield item

    folder = opened(tmp_path)
    assert write(folder, 1)
    folder._touched, folder._no_scan_before = Busy({digest(1): 0.0}), 0.0
    folder.refresh()
    assert read(folder, 1)


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "gone"])
def test_what_is_no_file_is_no_page(tmp_path: Path, kind: str) -> None:
    folder, path = opened(tmp_path), file_of(opened(tmp_path), 1)
    assert write(folder, 1)
    path.rename(tmp_path / "moved")
    make = {"pipe": os.mkfifo, "link": lambda p: p.symlink_to(tmp_path / "moved"), "folder": os.mkdir}
    make.get(kind, lambda p: None)(path)
    assert not read(folder, 1) and digest(1) not in folder


def test_a_full_disk_is_said_once_and_tried_again(tmp_path: Path, monkeypatch, caplog) -> None:
    folder, writev = opened(tmp_path), os.writev

    def full(file: int, pieces: list) -> int:
        writev(file, [pieces[0][:9]])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", full)
        assert not write(folder, 1) and not write(folder, 2)
        patched.setattr(module, "RETRY_S", 0.0)
        folder._no_writes_before = 0.0
        assert not write(folder, 1)
    assert [len(caplog.records), len(list(folder.path.iterdir()))] == [1, 1]
    assert "No space left" in caplog.text and write(folder, 1) and read(folder, 1)


def test_a_failing_disk_is_a_miss(tmp_path: Path, monkeypatch, caplog) -> None:
    folder = opened(tmp_path)
    assert write(folder, 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "readv", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        assert not read(folder, 1)
    assert "Input/output error" in caplog.text and read(opened(tmp_path), 1)


def test_the_limit_holds_and_the_least_goes_first(tmp_path: Path) -> None:
    folder, other = opened(tmp_path, 6), opened(tmp_path, 6, b"o" * 16)
    assert write(other, 0) and write(folder, 1, priority=50)
    os.utime(file_of(other, 0), (0, 0))
    for index in range(2, 6):
        assert write(folder, index)
        os.utime(file_of(folder, index), (index, index))
    folder.set_priority(digest(3), 80)
    folder._touched.clear()
    folder.touch([digest(2)])
    for index in (6, 7):
        assert write(folder, index)
        assert sum(entry.num_bytes for entry in page_entries(tmp_path)) <= 6 * FILE
    left = [read(opened(tmp_path, 6), index) for index in range(8)]
    assert left == [False, True, True, True, False, True, True, True]  # the oldest two, for one page and the margin
    assert not write(opened(tmp_path / "tiny", 0.5), 1)


def test_two_servers_learn_of_each_other(tmp_path: Path, monkeypatch) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    assert write(one, 1) and write(other, 1) and write(one, 2) and digest(2) not in other
    other._no_scan_before = 0.0
    other.refresh()
    assert read(other, 2) and len(list(page_entries(tmp_path))) == 2
    file_of(one, 2).unlink()
    assert not read(other, 2) and read(other, 1)


KILLED = """
import itertools, sys
from pathlib import Path
from tests.cpu.prefix_store.test_folder import opened, write
folder = opened(Path(sys.argv[1]), 1e6)
for index in itertools.count():
    write(folder, index)
    print(flush=True)
"""


def test_a_killed_writer_leaves_only_whole_pages(tmp_path: Path) -> None:
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(40):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    folder = opened(tmp_path)
    assert len(folder) >= 40 and all(read(folder, index) for index in range(len(folder)))
    old = folder.path / "0.tmp"
    old.touch()
    os.utime(old, (0, time.time() - module.STALE_S - 1))
    opened(tmp_path)
    assert not old.exists()


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(EngineError, match="others may write"):
        opened(tmp_path / "open")
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match="cannot be used"):
        opened(tmp_path / "file")


def test_prefixes_are_listed_packed_unpacked_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, archive = opened(tmp_path / "a"), tmp_path / "a.tar"
    assert write(folder, 1) and write(folder, 2)
    (folder.path / "notes.txt").touch()
    assert main(["cache", "save", str(tmp_path / "a"), str(archive)]) == 0
    assert archive.stat().st_mode & 0o777 == 0o600
    data = bytearray(archive.read_bytes())
    data[data.index(content(2)) + 5] ^= 1
    archive.write_bytes(data)
    assert main(["cache", "load", str(tmp_path / "b"), str(archive)]) == 0
    assert "loaded 1 pages; left out 1" in capsys.readouterr().out
    assert [read(opened(tmp_path / "b"), index) for index in (1, 2)] == [True, False]
    assert main(["cache", "list", "--prefix-dir", str(tmp_path / "a"), "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert (listed["key"], listed["num_pages"], listed["num_bytes"]) == (KEY.hex(), 2, 2 * FILE)
    assert main(["cache", "clear", str(tmp_path / "a")]) == 0 and not read(folder, 1)
    assert (folder.path / "notes.txt").exists() and main(["cache", "list", "--prefix-dir", str(tmp_path / "a")]) == 0
    capsys.readouterr()
    for arguments in (["save", "a", "a.tar"], ["load", "b", "none.tar"], ["clear", "none"]):
        assert main(["cache", arguments[0], *(str(tmp_path / name) for name in arguments[1:])]) == 1
        assert "cannot be" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../" + "0" * 32 + "-035.page", "/etc/" + "0" * 32 + "-035.page", "k/about.json"])
def test_an_archive_reaches_nothing_outside(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO(b""))
        link = tarfile.TarInfo(f"{KEY.hex()}/{PageName(digest(1), 35)}")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert load_prefixes(tmp_path / "b", tmp_path / "x.tar") == (0, 2)
    assert not list((tmp_path / "b").iterdir())
