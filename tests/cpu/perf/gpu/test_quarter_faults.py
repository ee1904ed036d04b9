"""The queue of GPU experiments where files are damaged, folders are not to be written, or two queues meet."""

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from kvforge.common.errors import KvforgeError
from perf.gpu import quarter
from perf.gpu.models import COMPLETE
from perf.gpu.queue import packages, running
from perf.gpu.queue.bundle import BUNDLE, take_bundle, write_bundle
from perf.gpu.queue.experiment import sources_digest
from perf.gpu.queue.experiments import EXPERIMENTS
from perf.gpu.queue.results import keep, state_of
from perf.gpu.queue.running import run_one, run_queue
from perf.harness.engines import ROOT
from tests.cpu.perf.gpu.test_quarter import fake

OPERATORS = next(one for one in EXPERIMENTS if one.name == "operators")
DAMAGED = ("", "{", "[]", "null", "{}", '"x"', '{"sources_sha256": 5, "exit": 0}', "\xff")


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_record_is_listed_and_run_again(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("operators.json", "operators.failed.json"):
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    assert quarter.main(["--list", "--json", "--only", "operators", "--results", str(tmp_path)]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert (row["state"], row["start_s"]) == ("unreadable", 0)


def test_folders_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for out, folder, option in ((file, tmp_path, "--out"), (tmp_path, file / "below", "--results")):
        with pytest.raises(KvforgeError, match=f"cannot be written .*{option}"):
            run_queue([fake("a")], 60, out, folder, "a card", tiny=True)


def test_two_queues_do_not_share_a_folder(tmp_path: Path) -> None:
    """Each would take the other's report for its own."""
    script = (
        "import sys; from pathlib import Path; from tests.cpu.perf.gpu.test_quarter import fake, run_queue; "
        "run_queue([fake('a', '--sleep', '30', '--mark', sys.argv[2])], 60, Path(sys.argv[1]), Path(sys.argv[1]),"
        "'c', tiny=True)"
    )
    mark, shared = tmp_path / "mark", tmp_path / "shared"
    command = [sys.executable, "-c", script, str(shared), str(mark)]
    first = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        _wait_for(mark)
        for out, folder in ((shared, tmp_path / "other"), (tmp_path / "other", shared)):
            with pytest.raises(KvforgeError, match="another queue runs in"):
                run_queue([fake("b")], 60, out, folder, "a card", tiny=True)
    finally:
        first.kill()
        first.wait()
    assert run_queue([fake("b")], 60, shared, shared, "a card", tiny=True)[0]["exit"] == 0


def test_a_full_disk_ends_no_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("keep", "write_bundle"):
        with monkeypatch.context() as patched:
            patched.setattr(running, name, full)
            records = run_queue([fake("a"), fake("b")], 60, tmp_path, tmp_path, "a card", tiny=True)
        assert [record["exit"] for record in records] == ([1, 1] if name == "keep" else [0, 0])
        assert "No space left on device" in capsys.readouterr().out


def test_what_a_program_has_started_ends_with_it_and_with_the_queue(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    run_one(fake("a", "--start", str(mark)), tmp_path, 60, "a card", tiny=True)
    _wait_for_end(int(mark.read_text()))
    mark.unlink()
    script = (
        "import sys; from pathlib import Path; from tests.cpu.perf.gpu.test_quarter import fake, run_one; "
        "run_one(fake('a', '--start', sys.argv[2], '--sleep', '60'), Path(sys.argv[1]), 60, 'a card', tiny=True)"
    )
    command = [sys.executable, "-c", script, str(tmp_path), str(mark)]
    queue = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    _wait_for(mark)
    queue.kill()
    queue.wait()
    _wait_for_end(int(mark.read_text()))


def test_files_from_before_1980_go_into_a_bundle(tmp_path: Path) -> None:
    keep(tmp_path, {"experiment": "a", "exit": 0, "sources_sha256": ""}, b"said")
    os.utime(tmp_path / "a.json", (0, 0))
    write_bundle(tmp_path / BUNDLE, tmp_path)
    with zipfile.ZipFile(tmp_path / BUNDLE) as bundle:
        assert bundle.namelist() == ["a.json", "a.log"]


def test_an_older_result_does_not_take_the_place_of_a_current_one(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, digest, value in ((here, sources_digest(OPERATORS), "new"), (there, "of other sources", "old")):
        folder.mkdir()
        keep(folder, {"experiment": "operators", "exit": 0, "sources_sha256": digest, "report": value}, b"said")
    keep(there, {"experiment": "pieces", "exit": 0, "sources_sha256": "", "report": 1}, b"said")
    write_bundle(tmp_path / BUNDLE, there)
    assert take_bundle(tmp_path / BUNDLE, here) == ["pieces.json", "pieces.log"]
    state = state_of(OPERATORS, here)
    assert state.record is not None and state.record["report"] == "new"


@pytest.mark.parametrize("name", [".hidden.json", "a.json", "folder/a.log", "a.txt"])
def test_a_bundle_with_anything_but_records_writes_nothing(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / BUNDLE, "w") as bundle:
        bundle.writestr("good.log", "said")
        bundle.writestr(name, "[]")
    with pytest.raises(KvforgeError, match="which is no result"):
        take_bundle(tmp_path / BUNDLE, tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_the_mark_of_compiled_graphs_comes_back_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "there" / "kvforge-llama8b" / "cuda" / "a"
    (folder / "rank0").mkdir(parents=True)
    (folder / "rank0" / "lower.pt2").write_bytes(b"graph")
    (folder / COMPLETE).write_text("digest")
    packages.keep_packages(tmp_path / "packages.zip", tmp_path / "there")
    extract = zipfile.ZipFile._extract_member  # type: ignore[attr-defined]

    def full_at_the_graph(self: zipfile.ZipFile, member: object, *rest: object) -> str:
        if "lower" in str(member):
            raise OSError(28, "No space left on device")
        return extract(self, member, *rest)

    monkeypatch.setattr(zipfile.ZipFile, "_extract_member", full_at_the_graph)
    with pytest.raises(KvforgeError, match="No space left"):
        packages.restore_packages(tmp_path / "packages.zip", tmp_path / "here")
    assert not list(tmp_path.glob(f"here/**/{COMPLETE}"))


def _wait_for(mark: Path) -> None:
    for _ in range(300):
        if mark.exists() and mark.read_text():
            return
        time.sleep(0.1)
    pytest.fail("the program never began")


def _wait_for_end(pid: int) -> None:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":  # ended, and waits for this machine's first process
            return
        time.sleep(0.1)
    pytest.fail("a process outlived what had started it")
