"""A run that is interrupted, damaged or mistaken: it continues to the same weights, or says why not."""

import csv
import errno
import fcntl
import math
import os
import signal
from pathlib import Path

import pytest
import torch

from kvforge.common.errors import KvforgeError
from kvforge.distill import DistillConfig, distill
from kvforge.distill.packing import Batch, PackedData
from kvforge.distill.state import save_state
from tests.support.models.distillation import load_with_teacher, random_data, rewired_checkpoint

CONFIG = DistillConfig(
    dtype="fp32", device="cpu", max_steps=6, batch_size=4, micro_batch=3, lr=1e-3, checkpoint_every=2
)


def config(**changes) -> DistillConfig:
    return DistillConfig(**{**vars(CONFIG), **changes})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewired_checkpoint(tmp_path_factory.mktemp("resume") / "c", early_exit=True)


def saved(work: Path) -> dict:
    return torch.load(work / "state.pt", weights_only=True)


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        same(a[name], b[name]) if isinstance(a[name], dict) else torch.equal(a[name], b[name]) for name in a
    )


@pytest.mark.parametrize(("train", "dtype"), [("partial", "fp32"), ("partial", "bf16"), ("full", "fp32")])
def test_resumed_equals_uninterrupted(checkpoint: Path, tmp_path: Path, train: str, dtype: str) -> None:
    settings, data = config(train=train, dtype=dtype), random_data()
    whole = load_with_teacher(checkpoint)
    distill(settings, whole, data, tmp_path / "whole")
    early = load_with_teacher(checkpoint)
    distill(settings, early, data, tmp_path / "parts", stop_after=3)
    assert not same(early.state_dict(), whole.state_dict())
    with (tmp_path / "parts" / "metrics.csv").open("a") as file:
        file.write("4,512,1.0,1e-3,1,1,1,1,1,1\n5,64")  # killed after its last state
    resumed = load_with_teacher(checkpoint)
    progress = distill(settings, resumed, data, tmp_path / "parts")
    assert progress.step == 6 and same(resumed.state_dict(), whole.state_dict())
    first, second = saved(tmp_path / "whole"), saved(tmp_path / "parts")
    assert same(first["weights"], second["weights"]) and same(first["optimizer"], second["optimizer"])
    rows = [list(csv.DictReader((tmp_path / run / "metrics.csv").open())) for run in ("whole", "parts")]
    for one, other in zip(*rows, strict=True):
        assert {k: v for k, v in one.items() if k != "seconds"} == {k: v for k, v in other.items() if k != "seconds"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_its_last_step(checkpoint: Path, tmp_path: Path, number: int) -> None:
    whole, resumed = load_with_teacher(checkpoint), load_with_teacher(checkpoint)
    distill(CONFIG, whole, random_data(), tmp_path / "whole")
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        distill(
            CONFIG,
            load_with_teacher(checkpoint),
            random_data(),
            tmp_path / "work",
            on_step=lambda row: os.kill(os.getpid(), number) if row["step"] == 2 else None,
        )
    assert signal.getsignal(number) is before
    assert saved(tmp_path / "work")["progress"]["step"] == 3
    distill(CONFIG, resumed, random_data(), tmp_path / "work")
    assert same(resumed.state_dict(), whole.state_dict())


def test_a_finished_run_only_restores_its_weights(checkpoint: Path, tmp_path: Path) -> None:
    model, again = load_with_teacher(checkpoint), load_with_teacher(checkpoint)
    first = distill(CONFIG, model, random_data(), tmp_path)
    rows = []
    second = distill(CONFIG, again, random_data(), tmp_path, on_step=rows.append)
    assert rows == [] and second == first and same(model.state_dict(), again.state_dict())


@pytest.mark.parametrize(
    ("changes", "data", "source", "word"),
    [
        ({"lr": 2e-3}, random_data(), "", r"with lr 0\.001, and this one has 0\.002"),
        ({"train": "upper"}, random_data(), "", "with train 'partial'"),
        ({}, random_data(seed=1), "", "with other data, or another --mask"),
        ({}, random_data(), "another checkpoint", "with another checkpoint to start from"),
    ],
)
def test_state_of_another_run_is_refused(
    checkpoint: Path, tmp_path: Path, changes: dict, data: PackedData, source: str, word: str
) -> None:
    distill(CONFIG, load_with_teacher(checkpoint), random_data(), tmp_path, stop_after=2)
    before = (tmp_path / "state.pt").read_bytes(), (tmp_path / "metrics.csv").read_text()
    with pytest.raises(KvforgeError, match=rf"{word}.*another --work"):
        distill(config(**changes), load_with_teacher(checkpoint), data, tmp_path, source=source)
    assert before == ((tmp_path / "state.pt").read_bytes(), (tmp_path / "metrics.csv").read_text())


def test_state_of_another_teacher_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    distill(CONFIG, load_with_teacher(checkpoint), random_data(), tmp_path / "work", stop_after=1)
    other = load_with_teacher(rewired_checkpoint(tmp_path / "c", early_exit=True, seed=5))
    with pytest.raises(KvforgeError, match="with another teacher;"):
        distill(CONFIG, other, random_data(), tmp_path / "work")


def test_how_a_step_is_cut_may_change(checkpoint: Path, tmp_path: Path) -> None:
    distill(CONFIG, load_with_teacher(checkpoint), random_data(), tmp_path, stop_after=2)
    other = config(micro_batch=1, checkpoint_every=5)
    assert distill(other, load_with_teacher(checkpoint), random_data(), tmp_path).step == 6


def test_a_run_of_an_earlier_version_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    """Which wrote the short names of dtypes."""
    distill(CONFIG, load_with_teacher(checkpoint), random_data(), tmp_path, stop_after=2)
    short = {"float32": "fp32", "bfloat16": "bf16"}
    state = saved(tmp_path)
    state["identity"]["dtype"] = short[state["identity"]["dtype"]]
    save_state(tmp_path / "state.pt", state)
    assert distill(CONFIG, load_with_teacher(checkpoint), random_data(), tmp_path).step == 6


def test_damaged_state_is_named(checkpoint: Path, tmp_path: Path) -> None:
    distill(CONFIG, load_with_teacher(checkpoint), random_data(), tmp_path, stop_after=1)
    content = (tmp_path / "state.pt").read_bytes()
    (tmp_path / "state.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(KvforgeError, match=r"state\.pt is not a readable training state"):
        distill(CONFIG, load_with_teacher(checkpoint), random_data(), tmp_path)


class Poisoned(PackedData):
    """Data of which one step's weights become infinite, as a damaged file's might."""

    def __init__(self, data: PackedData, step: int) -> None:
        self.__dict__ = data.__dict__
        self.bad = set(data.epoch_order(0, 0)[step * 4 : step * 4 + 1])

    def batch(self, indices) -> Batch:
        batch = super().batch(indices)
        return Batch(batch.input_ids, batch.segments, batch.weight * (math.inf if self.bad & set(indices) else 1))


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_state(checkpoint: Path, tmp_path: Path) -> None:
    data = random_data()
    distill(CONFIG, load_with_teacher(checkpoint), data, tmp_path / "good", stop_after=2)
    with pytest.raises(KvforgeError, match="The loss of step 4 is nan"):
        distill(CONFIG, load_with_teacher(checkpoint), Poisoned(data, 3), tmp_path / "bad")
    kept = saved(tmp_path / "bad")
    assert kept["progress"]["step"] == 2 and same(kept["weights"], saved(tmp_path / "good")["weights"])
    rows = (tmp_path / "bad" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 1 + 3 and "nan" not in "".join(rows)
    resumed, whole = load_with_teacher(checkpoint), load_with_teacher(checkpoint)
    distill(CONFIG, resumed, data, tmp_path / "bad")
    distill(CONFIG, whole, data, tmp_path / "whole")
    assert same(resumed.state_dict(), whole.state_dict())


def test_a_gradient_that_is_not_finite_stops(checkpoint: Path, tmp_path: Path) -> None:
    model = load_with_teacher(checkpoint)
    model.model.norm_swiftkv.weight.register_hook(lambda grad: grad * math.nan)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(KvforgeError, match="The gradient of step 1 is nan"):
        distill(CONFIG, model, random_data(), tmp_path)
    assert same(model.state_dict(), before) and not (tmp_path / "state.pt").exists()


@pytest.mark.parametrize("how", ["OSError", "RuntimeError"])
def test_full_disk_keeps_the_last_state(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    write = torch.save

    def full(state, file) -> None:
        if state["progress"]["step"] < 4:
            write(state, file)
            return
        file.write(b"half")
        if how == "OSError":
            raise OSError(errno.ENOSPC, "No space left on device")
        raise RuntimeError("PytorchStreamWriter failed writing file data.pkl: file write failed")

    whole, resumed = load_with_teacher(checkpoint), load_with_teacher(checkpoint)
    distill(CONFIG, whole, random_data(), tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        message = r"state\.pt cannot be written \((No space left|PytorchStreamWriter).*the state before it is kept"
        with pytest.raises(KvforgeError, match=message):
            distill(CONFIG, load_with_teacher(checkpoint), random_data(), tmp_path / "work")
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["metrics.csv", "state.pt"]
    assert saved(tmp_path / "work")["progress"]["step"] == 2
    distill(CONFIG, resumed, random_data(), tmp_path / "work")
    assert same(resumed.state_dict(), whole.state_dict())


def test_full_disk_at_the_log(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def full(self, mode="r", *args, **kwargs):
        if self.name == "metrics.csv" and mode == "a":
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(KvforgeError, match=r"metrics\.csv cannot be written \(No space left on device\)"):
        distill(CONFIG, load_with_teacher(checkpoint), random_data(), tmp_path)


def test_data_without_weights_is_named(checkpoint: Path, tmp_path: Path) -> None:
    class Unweighted(PackedData):
        def __init__(self, data: PackedData) -> None:
            self.__dict__ = data.__dict__

        def batch(self, indices) -> Batch:
            batch = super().batch(indices)
            return Batch(batch.input_ids, batch.segments, batch.weight * 0)

    with pytest.raises(KvforgeError, match="sequences of step 1 hold no token with a weight"):
        distill(CONFIG, load_with_teacher(checkpoint), Unweighted(random_data()), tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a,b\n1,2\n"])
def test_a_log_of_something_else_is_left_alone(checkpoint: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics.csv").write_bytes(content)
    with pytest.raises(KvforgeError, match=r"metrics\.csv is not the log of a distillation; choose another --work"):
        distill(CONFIG, load_with_teacher(checkpoint), random_data(), tmp_path)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("metrics.csv", content)]


def test_lines_that_are_not_of_the_log_are_dropped(checkpoint: Path, tmp_path: Path) -> None:
    """What a crash of the machine may leave of the log."""
    distill(CONFIG, load_with_teacher(checkpoint), random_data(), tmp_path, stop_after=2)
    log = tmp_path / "metrics.csv"
    with log.open("ab") as file:
        file.write(b"x,,,,,,,,,\n2\xff,1,1,1,1,1,1,1,1,1\n\0\0\0")
    distill(CONFIG, load_with_teacher(checkpoint), random_data(), tmp_path)
    assert [row["step"] for row in csv.DictReader(log.open())] == ["1", "2", "3", "4", "5", "6"]


def test_work_that_cannot_be_a_directory_is_one_sentence(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for work in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(KvforgeError, match=r"cannot be a run's directory \(.*; choose another --work"):
            distill(CONFIG, load_with_teacher(checkpoint), random_data(), work)
    assert (tmp_path / "file").read_text() == "kept"


def test_every_step_is_called_for_whenever_a_run_ends(checkpoint: Path, tmp_path: Path) -> None:
    """Step 4 has a state; ending while it is called for, it is called for again."""
    seen = []

    def end(row) -> None:
        seen.append(row["step"])
        if seen == [1, 2, 3, 4]:
            raise RuntimeError("ends here")

    with pytest.raises(RuntimeError, match="ends here"):
        distill(CONFIG, load_with_teacher(checkpoint), random_data(), tmp_path, on_step=end)
    distill(CONFIG, load_with_teacher(checkpoint), random_data(), tmp_path, on_step=end)
    assert seen == [1, 2, 3, 4, 3, 4, 5, 6]
    assert [row["step"] for row in csv.DictReader((tmp_path / "metrics.csv").open())] == ["1", "2", "3", "4", "5", "6"]


def test_one_run_at_a_time(checkpoint: Path, tmp_path: Path) -> None:
    """The second run is refused, whatever it is; the first one goes on."""
    refused = []

    def start_another(row) -> None:
        with pytest.raises(KvforgeError, match=r"Another run works in .*; wait for it, or choose another --work\."):
            distill(CONFIG, load_with_teacher(checkpoint), random_data(), tmp_path)
        refused.append(row["step"])

    assert distill(CONFIG, load_with_teacher(checkpoint), random_data(), tmp_path, on_step=start_another).step == 6
    assert refused == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in csv.DictReader((tmp_path / "metrics.csv").open())] == ["1", "2", "3", "4", "5", "6"]


def test_a_file_system_that_cannot_lock_a_directory(checkpoint: Path, tmp_path: Path, monkeypatch) -> None:
    """As NFS, which locks what is open for writing only."""

    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert distill(CONFIG, load_with_teacher(checkpoint), random_data(), tmp_path).step == 6


@pytest.mark.parametrize("room", [0, 1_000, 200_000])
@pytest.mark.parametrize("raised", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_what_stops_the_writing_of_a_state_is_named(
    tmp_path: Path, monkeypatch, room: int, raised: BaseException
) -> None:
    """torch's writer raises a RuntimeError about positions in its file, whatever the reason."""

    class Stopped:
        def __init__(self, file) -> None:
            self.file, self.room = file, room

        def write(self, content: bytes) -> int:
            self.room -= len(content)
            if self.room < 0:
                raise raised
            return self.file.write(content)

        def __getattr__(self, name: str):
            return getattr(self.file, name)

    write = torch.save
    save_state(tmp_path / "state.pt", {"step": 1})
    monkeypatch.setattr(torch, "save", lambda state, file: write(state, Stopped(file)))
    expected = KeyboardInterrupt if isinstance(raised, KeyboardInterrupt) else KvforgeError
    with pytest.raises(expected) as caught:
        save_state(tmp_path / "state.pt", {"step": 2, "weights": torch.zeros(100_000)})
    if expected is KvforgeError:
        assert "cannot be written (No space left on device); the state" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]
    assert torch.load(tmp_path / "state.pt") == {"step": 1}
