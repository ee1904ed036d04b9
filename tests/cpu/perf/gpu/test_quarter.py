"""The queue of GPU experiments: what it plans, what is on disk whenever it is killed, and what comes back."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from kvforge.common.errors import KvforgeError
from perf.gpu import models, quarter
from perf.gpu.models import COMPLETE
from perf.gpu.queue import packages
from perf.gpu.queue import plan as planning
from perf.gpu.queue.bundle import BUNDLE, take_bundle, write_bundle
from perf.gpu.queue.experiment import Experiment, sources_digest
from perf.gpu.queue.plan import Planned, plan
from perf.gpu.queue.results import keep, state_of
from perf.gpu.queue.running import run_one, run_queue
from perf.harness.engines import ROOT

PROGRAM = "tests.support.cuda.fake_experiment"


def fake(name: str, *arguments: str, seconds: int = 2, carried: tuple[str, ...] = ()) -> Experiment:
    """An experiment that sleeps, prints, reports and exits as it is told."""
    source = ("tests/support/cuda/fake_experiment.py",)
    return Experiment(
        name, f"what is {name}?", seconds, PROGRAM, ("--device", "cpu", *arguments), arguments, source, carried
    )


def test_a_plan_fills_the_time_with_what_has_no_result(tmp_path: Path) -> None:
    experiments = [fake(name, seconds=seconds) for name, seconds in (("a", 60), ("b", 300), ("c", 50), ("d", 10))]
    entries = plan(experiments, 130, tmp_path)
    assert [entry.start_s for entry in entries] == [0, None, 60, 110]
    assert entries[1].why == "no time left"
    run_queue(experiments[:1], 100, tmp_path / "out", tmp_path, "a card", tiny=True)
    entries = plan(experiments, 130, tmp_path)
    assert [entry.start_s for entry in entries] == [None, None, 0, 50] and entries[0].state.kind == "done"
    assert [entry.start_s for entry in plan(experiments, 130, tmp_path, again=True)] == [0, None, 60, 110]
    shown = planning.plan_table(entries, tmp_path)
    assert "done, not committed" in shown and "0:50" in shown


def test_a_plan_waits_for_what_must_be_brought_along(tmp_path: Path) -> None:
    needs = fake("needs", carried=("fa3",))
    assert plan([needs], 100, tmp_path)[0].why == "needs fa3 in --carried"
    assert plan([needs], 100, tmp_path, carry_later=True)[0].start_s == 0
    (tmp_path / "carried" / "fa3").mkdir(parents=True)
    assert plan([needs], 100, tmp_path, tmp_path / "carried")[0].start_s == 0


def test_a_result_is_stale_when_a_source_or_the_command_changes(tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.write_text("one")
    experiment = dataclasses.replace(fake("a"), sources=("kernel.py",))
    assert state_of(experiment, tmp_path, tmp_path).kind == "never"
    record = {"experiment": "a", "exit": 0, "sources_sha256": sources_digest(experiment, tmp_path)}
    keep(tmp_path, record, b"said")
    assert state_of(experiment, tmp_path, tmp_path).kind == "done"
    longer = dataclasses.replace(experiment, arguments=("--more",))
    assert state_of(longer, tmp_path, tmp_path).kind == "stale"
    source.write_text("two")
    assert state_of(experiment, tmp_path, tmp_path).kind == "stale"
    with pytest.raises(FileNotFoundError, match="no file is named gone"):
        state_of(dataclasses.replace(experiment, sources=("gone",)), tmp_path, tmp_path)


def test_a_failure_leaves_the_last_success_and_a_success_ends_it(tmp_path: Path) -> None:
    good, bad = fake("a", "--report", "1"), fake("a", "--exit", "3", "--say", "it broke")
    for experiment in (good, bad):
        run_queue([experiment], 60, tmp_path / "out", tmp_path, "a card", tiny=True)
    state = state_of(good, tmp_path)
    assert state.record and state.record["report"] == {"value": 1} and state.record["card"] == "a card"
    assert state.failure and state.failure["exit"] == 3 and "it broke" in (tmp_path / "a.failed.log").read_text()
    run_queue([good], 60, tmp_path / "out", tmp_path, "a card", tiny=True)
    assert state_of(good, tmp_path).failure is None and not list(tmp_path.glob("*.failed.*"))


def test_a_program_without_a_report_has_failed(tmp_path: Path) -> None:
    record, _ = run_one(fake("a", "--no-report"), tmp_path, 60, "a card", tiny=True)
    assert (record["exit"], record["report"]) == (1, None)


def test_a_program_past_its_limit_is_cut_off_and_what_it_said_is_kept(tmp_path: Path) -> None:
    slow = fake("slow", "--say", "first row", "--report", "7", "--sleep", "60")
    start = time.monotonic()
    record, log = run_one(slow, tmp_path, 4, "a card", tiny=True)
    assert time.monotonic() - start < 30
    assert record["exit"] == -signal.SIGKILL and b"first row" in log and record["report"] == {"value": 7}


def test_nothing_begins_that_the_time_cannot_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = run_queue([fake("long", seconds=100), fake("short", seconds=3)], 20, tmp_path, tmp_path, "a card", True)
    assert [record["experiment"] for record in records] == ["short"]
    assert "long: not begun, 1" in capsys.readouterr().out


def test_killed_at_any_second_every_finished_result_is_readable(tmp_path: Path) -> None:
    """The queue is killed after random times, each time going on in the same folders."""
    folder, out = tmp_path / "results", tmp_path / "out"
    script = (
        "from pathlib import Path; from tests.cpu.perf.gpu.test_quarter import fake, plan, run_queue; "
        "experiments = [fake(f'e{n}', '--sleep', '0.3', '--report', str(n)) for n in range(8)]; "
        f"folder = Path({str(folder)!r}); folder.mkdir(exist_ok=True); "
        "wanted = [one.experiment for one in plan(experiments, 900, folder) if one.start_s is not None]; "
        f"run_queue(wanted, 900, Path({str(out)!r}), folder, 'a card', tiny=True)"
    )
    rng, said = random.Random(5), ""
    for kill in (*([True] * 5), False):
        process = subprocess.Popen(
            [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        if kill:
            time.sleep(rng.uniform(1.0, 4.0))
            process.kill()
        said += process.communicate(timeout=120)[0]
        finished = {line.split(":")[0] for line in said.splitlines() if ": done in" in line}
        for name in finished:
            assert json.loads((folder / f"{name}.json").read_text())["report"] == {"value": int(name[1:])}
            assert (folder / f"{name}.log").read_text()
        for file in folder.glob("e*.json"):
            json.loads(file.read_text())
        if (out / BUNDLE).exists():
            with zipfile.ZipFile(out / BUNDLE) as bundle:
                assert bundle.testzip() is None
                assert {f"{name}.json" for name in finished} - set(bundle.namelist()) <= {f"{max(finished)}.json"}
    assert len(finished) == 8
    with zipfile.ZipFile(out / BUNDLE) as bundle:
        assert len(bundle.namelist()) == 16


def test_a_killed_queue_takes_the_running_program_along(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    script = (
        "from pathlib import Path; from tests.cpu.perf.gpu.test_quarter import fake, run_one; "
        f"slow = fake('a', '--mark', {str(mark)!r}, '--sleep', '60'); "
        f"run_one(slow, Path({str(tmp_path)!r}), 60, 'a card', tiny=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    for _ in range(300):
        if mark.exists() and mark.read_text():
            break
        time.sleep(0.1)
    process.kill()
    process.wait()
    for _ in range(100):
        if not Path(f"/proc/{mark.read_text()}").exists():
            return
        time.sleep(0.1)
    pytest.fail("the program outlived the queue")


def test_results_come_back_as_one_file(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    keep(there, {"experiment": "a", "exit": 0, "sources_sha256": ""}, b"said")
    write_bundle(tmp_path / BUNDLE, there)
    assert take_bundle(tmp_path / BUNDLE, here) == ["a.json", "a.log"]
    assert (here / "a.json").read_bytes() == (there / "a.json").read_bytes()
    with zipfile.ZipFile(tmp_path / "odd.zip", "w") as odd:
        odd.writestr("../out.json", "{}")
    (tmp_path / "none.zip").write_text("nothing")
    for name, told in (("odd", "is no result"), ("none", "cannot be read"), ("gone", "cannot be read")):
        with pytest.raises(KvforgeError, match=told):
            take_bundle(tmp_path / f"{name}.zip", here)


def test_the_command_lists_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quarter.main(["--list", "--json", "--results", str(tmp_path), "--minutes", "1"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [one.name for one in quarter.EXPERIMENTS]
    assert rows[0]["start_s"] == 0 and {row["state"] for row in rows} == {"never"}
    assert quarter.main(["--list", "--results", str(tmp_path)]) == 0
    assert "never" in capsys.readouterr().out
    for arguments in (["--tiny"], ["--unpack", "x"], ["--only", "nothing"]):
        with pytest.raises(SystemExit):
            quarter.main(arguments)
    with pytest.raises(KvforgeError, match="give --results another folder"):
        quarter.main(["--device", "cpu", "--tiny"])


def test_the_command_runs_an_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--tiny", "--only", "operators", "--results", str(tmp_path / "results")]
    assert quarter.main([*arguments, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "operators: done in" in said and "done, not committed" in said
    record = json.loads((tmp_path / "results" / "operators.json").read_text())
    assert record["report"]["rows"] and "decode 2x128" in (tmp_path / "results" / "operators.log").read_text()


def test_times_are_minutes() -> None:
    entry = Planned(fake("a"), state_of(fake("a"), Path("/nonexistent")), 754.0)
    assert planning.minute(entry.start_s) == "12:34" and planning.minute(None) == ""


def test_compiled_graphs_are_kept_for_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for name, size in (("a", 10), ("b", 1000), ("unfinished", 10)):
        folder = there / "kvforge-llama8b" / "cuda" / name
        (folder / "rank0").mkdir(parents=True)
        (folder / "rank0" / "lower.pt2").write_bytes(bytes(size))
        if name != "unfinished":
            (folder / COMPLETE).write_text("digest")
    monkeypatch.setattr(packages, "MOST_BYTES", 500)
    assert packages.keep_packages(tmp_path / "packages.zip", there) == ["kvforge-llama8b/cuda/b"]
    packages.restore_packages(tmp_path / "packages.zip", here)
    assert [path.name for path in (here / "kvforge-llama8b" / "cuda").iterdir()] == ["a"]
    assert (here / "kvforge-llama8b/cuda/a/complete").read_text() == "digest"
    with zipfile.ZipFile(tmp_path / "odd.zip", "w") as odd:
        odd.writestr("etc/passwd", "")
    for name in ("odd", "gone"):
        with pytest.raises(KvforgeError, match=r"give the packages\.zip"):
            packages.restore_packages(tmp_path / f"{name}.zip", here)


def test_graphs_of_other_sources_are_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    class Target:
        PIECES = None
        check_toolchain = staticmethod(lambda options: None)
        isa = staticmethod(lambda: ("sm_90",))

        @staticmethod
        def write_graphs(config: object, options: object, folder: Path, progress: object) -> None:
            compiled.append(folder)

    monkeypatch.setattr(models, "load_target", lambda name: Target)
    config = models.model_config(models.TINY, models.VARIANTS["baseline"])
    options = models.resolved_options(config, models.VARIANTS["baseline"], models.Limits(8, 64, 128, 16), "cpu")
    for _ in range(2):
        models.compile_graphs(config, options, tmp_path / "graphs")
    assert len(compiled) == 1
    monkeypatch.setattr(models, "digest_of", lambda patterns, said: "of other sources")
    models.compile_graphs(config, options, tmp_path / "graphs")
    assert len(compiled) == 2
