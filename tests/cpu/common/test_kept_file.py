"""Files that others see as they were or whole."""

from pathlib import Path

import pytest

from kvforge.common.kept_file import write_kept


def test_a_kept_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "folder" / "kernels"
    write_kept(file, b"one")
    write_kept(file, b"two")
    assert file.read_bytes() == b"two"

    def fail(*names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_kept(file, b"three")
    assert file.read_bytes() == b"two" and [path.name for path in file.parent.iterdir()] == ["kernels"]


def test_writers_of_one_number_write_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in two containers that share a folder: one begins while the other is about to put its file in place."""
    file, replace = tmp_path / "kernels", Path.replace
    monkeypatch.setattr("threading.get_native_id", lambda: 1)
    monkeypatch.setattr("os.getpid", lambda: 1)

    def meet_another(half: Path, target: Path) -> None:
        monkeypatch.setattr(Path, "replace", replace)
        write_kept(file, b"another")
        half.replace(target)

    monkeypatch.setattr(Path, "replace", meet_another)
    write_kept(file, b"one")
    assert file.read_bytes() == b"one" and list(tmp_path.iterdir()) == [file]
