"""What is brought to a bare GPU machine: pieces that fit, joined in any order, and a tree that leaves room."""

import hashlib
from pathlib import Path

import pytest

from kvforge.common.errors import KvforgeError
from perf.gpu import quarter
from perf.gpu.carry import contents
from perf.gpu.carry.contents import CONTENTS, Content, prepare, tree_bytes
from perf.gpu.carry.pieces import add_piece, is_carried

MIB = 1 << 20
TREE_MIB = 34


def noise(num_bytes: int, seed: str) -> bytes:
    """Bytes that no compressor makes smaller."""
    return hashlib.shake_128(seed.encode()).digest(num_bytes)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Three pieces of two contents."""

    def maker(name: str, num_bytes: int) -> Content:
        def make(folder: Path) -> None:
            (folder / "package").mkdir()
            (folder / "package" / "library.so").write_bytes(noise(num_bytes, name))

        return Content(f"a library {name}", make)

    made = {"big": maker("big", 2_500_000), "small": maker("small", 100_000)}
    monkeypatch.setattr(contents, "CONTENTS", made)
    return prepare(["big", "small", "big"], tmp_path / "pieces", MIB)


def test_pieces_fit_and_are_joined_in_any_order(made: list[Path], tmp_path: Path) -> None:
    assert [piece.name for piece in made] == ["piece-1", "piece-2", "piece-3"]
    assert all(sum(file.stat().st_size for file in piece.iterdir()) <= MIB + 1000 for piece in made)
    carried = tmp_path / "carried"
    assert [add_piece(piece, carried) for piece in (made[2], made[0])] == [["small"], []]
    assert is_carried(carried, "small") and not is_carried(carried, "big") and not is_carried(None, "small")
    assert add_piece(made[1], carried) == ["big"]
    assert (carried / "big" / "package" / "library.so").read_bytes() == noise(2_500_000, "big")
    assert not list((carried / "parts").iterdir())
    assert add_piece(made[0], carried) == []  # again, when all is there


def test_a_damaged_piece_is_named(made: list[Path], tmp_path: Path) -> None:
    part = next(made[0].glob("big*"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    add_piece(made[0], tmp_path / "carried")
    add_piece(made[1], tmp_path / "carried")
    with pytest.raises(KvforgeError, match="big was damaged on the way"):
        add_piece(made[2], tmp_path / "carried")
    with pytest.raises(KvforgeError, match="is no piece"):
        add_piece(tmp_path, tmp_path / "carried")


def test_preparing_refuses_what_would_not_do(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(KvforgeError, match="is not empty"):
        prepare([], tmp_path / "full", MIB)
    with pytest.raises(KvforgeError, match="leaves no room"):
        prepare([], tmp_path / "new", 100)
    with pytest.raises(KvforgeError, match="no checkout"):
        tree_bytes(tmp_path)
    with pytest.raises(KvforgeError, match="--prepare failed"):
        contents._by_program("perf.gpu.no_such_program")(tmp_path)


def test_the_tree_leaves_room() -> None:
    """A call to a machine that is lent takes 64 MiB along, the tree included."""
    try:
        size = tree_bytes()
    except KvforgeError:
        pytest.skip("no checkout")
    assert size <= TREE_MIB * MIB, f"{size / MIB:.1f} MiB are tracked; large files belong elsewhere"
    assert quarter.LENT_BYTES - size >= 30 * MIB


def test_contents_say_what_they_are() -> None:
    assert all(content.what for content in CONTENTS.values())
