"""Object files are compiled anew where something that decides their contents changed, and only there."""

import os
from pathlib import Path

import pytest

from plugins import build, units
from plugins.object_cache import forget_old, included, mark_used, object_path

SOURCES = {
    "first/a/a.cpp": '#include <vector>\n#include "a/direct.h"\n#include "torch/library.h"\n',
    "first/a/direct.h": '#pragma once\n  #  include "native/far.h"\n',
    "first/native/far.h": '#include "a/direct.h"\n',
    "first/native/other.h": "",
    "second/native/far.h": "the first folder has one of this name\n",
    "second/b/b.cpp": '#include "native/far.h"\n#include "b/own.h"\n',
    "second/b/own.h": "",
}


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return [tmp_path / "first", tmp_path / "second"]


def test_files_included_by_way_of_others_are_found(folders: list[Path]) -> None:
    first, second = folders
    assert included(first / "a/a.cpp", folders) == [first / "a/direct.h", first / "native/far.h"]
    assert included(second / "b/b.cpp", folders) == [
        first / "a/direct.h",
        first / "native/far.h",
        second / "b/own.h",
    ]


@pytest.mark.parametrize("name", SOURCES)
def test_an_object_is_another_where_a_file_that_it_includes_is(folders: list[Path], name: str) -> None:
    def paths() -> list[Path]:
        sources = (folders[0] / "a/a.cpp", folders[1] / "b/b.cpp")
        return [object_path(folders[0], source, folders, ["-O1"], "g++ 12") for source in sources]

    before, file = paths(), folders[0].parent / name
    assert paths() == before
    file.write_text(file.read_text() + "// changed\n")
    changed = [x != y for x, y in zip(before, paths(), strict=True)]
    assert changed == {
        "first/a/a.cpp": [True, False],
        "first/a/direct.h": [True, True],
        "first/native/far.h": [True, True],
        "second/b/b.cpp": [False, True],
        "second/b/own.h": [False, True],
    }.get(name, [False, False])


def test_flags_and_compilers_have_objects_of_their_own(folders: list[Path]) -> None:
    source = folders[0] / "a/a.cpp"
    made = {
        object_path(folders[0], source, folders, flags, compiler)
        for flags in (["-O1"], ["-O2"], ["-O1", "-g"])
        for compiler in ("g++ 12", "g++ 13")
    }
    assert len(made) == 6


def test_only_what_changed_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (unit,) = (unit for unit in units.units([]) if unit.source == "native/marker.cpp")
    other = units.Unit(unit.source, (*unit.flags, "-DANOTHER"))
    chosen, commands, run = [unit], [], build._run
    monkeypatch.setattr(build, "units", lambda isas: tuple(chosen))

    def noted(command: list[str]) -> str:
        if "-o" in command:
            commands.append(command)
        return run(command)

    monkeypatch.setattr(build, "_run", noted)
    monkeypatch.setenv("KVFORGE_CACHE", str(tmp_path))
    first = build.build_library()
    assert ["-c" in command for command in commands] == [True, False]
    first.unlink()
    assert build.build_library() == first and ["-c" in command for command in commands[2:]] == [False]
    chosen[:] = [other]
    assert build.build_library() != first
    assert [("-DANOTHER" in command, "-c" in command) for command in commands[3:]] == [(True, True), (False, False)]
    assert len(list((tmp_path / "objects").iterdir())) == 2


def test_objects_that_nobody_used_for_long_are_deleted(tmp_path: Path) -> None:
    new, old, revived, half = (tmp_path / "objects" / name for name in ("new.o", "old.o", "revived.o", "old.o.1234"))
    new.parent.mkdir()
    for path in (new, old, revived, half):
        path.touch()
    for path in (old, revived, half):
        os.utime(path, (0, 0))
    assert mark_used(revived) and not mark_used(tmp_path / "objects" / "none.o")
    forget_old(tmp_path)
    assert new.is_file() and revived.is_file() and not old.exists() and not half.exists()
