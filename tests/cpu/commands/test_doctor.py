"""``kvforge doctor`` names every optional package, how to get an absent one, and what is too small for serving."""

import dataclasses
import json
import os
import resource
import socket
from pathlib import Path

import pytest

from kvforge.cli import main
from kvforge.commands import doctor as doctor_command
from kvforge.common.errors import BuildError
from kvforge.common.hardware import ISA_NAMES, best_isa
from kvforge.compiler.toolchain import check_paths
from kvforge.doctor import checks as doctor
from kvforge.doctor import kernels
from kvforge.doctor import packages as doctor_packages
from kvforge.doctor import serving as doctor_serving
from kvforge.doctor.finding import EVERY_COMMAND, SERVE, Check


@pytest.mark.parametrize(
    ("variable", "isa", "found"),
    [
        ("KVFORGE_CPU_ISA", "portable", "kernels for portable (KVFORGE_CPU_ISA; best: "),
        ("KVFORGE_BUILD_ISA", "portable", "kernels for portable (KVFORGE_BUILD_ISA; best: "),
        ("KVFORGE_BUILD_ISA", "amx", f"kernels for {ISA_NAMES[best_isa()]} (KVFORGE_BUILD_ISA; best: "),
    ],
)
def test_the_kernels_are_those_that_variables_name(
    variable: str, isa: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, isa)
    monkeypatch.setattr(kernels, "_rates", lambda: None)
    check = kernels.cpu_check()
    assert check.status == "ok" and found in check.found
    monkeypatch.setenv(variable, "sse9")
    check = kernels.cpu_check()
    assert check.status == "missing" and check.found.endswith(f"{variable}=sse9") and "portable, avx2" in check.advice


def test_absent_packages_come_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_packages, "installed_version", lambda package: None)
    checks = {check.name: check for check in doctor_packages.package_checks()}
    assert {
        "onnx",
        "onnxscript",
        "triton",
        "nvidia-modelopt",
        "tensorrt",
        "transformers",
        "tritonclient",
        "fastapi",
    } <= checks.keys()
    assert all(check.found == "not installed" and check.advice for check in checks.values())
    assert checks["onnx"].advice == checks["onnxscript"].advice == "pip install -e '.[onnx]'"
    assert checks["uvicorn"].advice == checks["llguidance"].advice == "pip install -e '.[serve]'"
    assert "CUDA build of torch" in checks["triton"].advice


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("raise ImportError('numpy.core.multiarray failed to import')", "ImportError: numpy.core.multiarray failed"),
        ("import os; os.kill(os.getpid(), 9)", "importing broken_one ends the process with code -9"),
        ("import absent_part", "ModuleNotFoundError: No module named 'absent_part'"),
    ],
)
def test_an_installed_package_that_cannot_be_imported_is_broken(
    lines: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_one.py").write_text(lines + "\n")
    (tmp_path / "broken_one-3.2.dist-info").mkdir()
    (tmp_path / "broken_one-3.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: broken-one\nVersion: 3.2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    sound = doctor_packages.Package("tqdm", "tqdm", "eval")
    broken = doctor_packages.Package("broken-one", "broken_one", "eval")
    first, check, last = doctor_packages.package_checks((sound, broken, sound))
    assert first.status == last.status == "ok"
    assert check.status == "broken" and check.found.startswith(f"3.2, cannot be imported: {reason}")
    assert check.advice == "pip install -e '.[eval]'"
    monkeypatch.setattr(doctor_command, "diagnose", lambda: [check])
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.startswith("BROKEN   broken-one")


@pytest.mark.parametrize(("flavour", "extra"), [("tensorrt", "tensorrt"), ("tensorrt-rtx", "tensorrt-rtx")])
def test_a_plan_builder_is_as_sound_as_its_packages(
    flavour: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "installed_flavour", lambda: flavour)
    use = doctor_packages.NEEDED_FOR[extra]
    sound = [Check(one.distribution, "ok", "1.0", needed_for=use) for one in doctor_packages.PACKAGES]
    assert doctor.plan_builder(sound).status == "ok"
    python = Check("python", "ok", "3.11", needed_for=EVERY_COMMAND)
    monkeypatch.setattr(doctor_command, "diagnose", lambda: [python, *sound, doctor.plan_builder(sound)])
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.count(use) == 1
    for index, one in enumerate(doctor_packages.PACKAGES):
        found = [*sound[:index], dataclasses.replace(sound[index], status="broken"), *sound[index + 1 :]]
        said = doctor.plan_builder(found)
        assert said.status == ("broken" if one.extra == extra else "ok")
        assert said.status == "ok" or f"of which {one.distribution} is broken" in said.found


def test_what_works_is_a_line_and_what_is_lacking_says_what_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [
        Check("CPU", "ok", "one"),
        Check("python", "ok", "3.11", needed_for=EVERY_COMMAND),
        Check("paint", "optional", "not installed", "buy some", "plots"),
        Check("brush", "ok", "1.0", needed_for="plots"),
        Check("server", "ok", "2.0", needed_for=SERVE),
    ]
    monkeypatch.setattr(doctor_command, "diagnose", lambda: found)
    assert main(["doctor"]) == 0
    lacks = "lacks    paint              not installed, for plots  -> buy some"
    works = f"ok       {EVERY_COMMAND}, {SERVE}"
    assert capsys.readouterr().out.splitlines() == ["CPU: one", works, lacks]
    assert main(["doctor", "-v"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(found) and lines[1:3] == ["ok       python             3.11", lacks]
    assert main(["doctor", "--json"]) == 0
    assert [check["needed_for"] for check in json.loads(capsys.readouterr().out)] == [c.needed_for for c in found]
    found[1] = Check("python", "missing", "3.9", "make another environment", EVERY_COMMAND)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("MISSING  python") and lines[2:] == [lacks]  # nothing works without it


@pytest.mark.parametrize(("version", "status"), [("1.26.4", "ok"), ("2.1.0", "optional")])
def test_numpy_2_is_named_where_pytritons_server_is_used(
    monkeypatch: pytest.MonkeyPatch, version: str, status: str
) -> None:
    versions = {"numpy": version, "nvidia-pytriton": "0.7.0"}
    monkeypatch.setattr(doctor_serving, "installed_version", versions.get)
    monkeypatch.setattr(doctor_serving.shutil, "which", lambda name: None)
    check = doctor_serving._numpy()
    assert (check.status, check.found) == (status, version)
    assert ("numpy<2" in check.advice) == (status == "optional")
    monkeypatch.setattr(doctor_serving.shutil, "which", lambda name: "/opt/tritonserver")
    assert doctor_serving._numpy().status == "ok"


@pytest.mark.parametrize(("blocks", "status"), [(2**20, "ok"), (2**14, "optional")])
def test_shared_memory_of_a_plain_container_is_too_small(
    monkeypatch: pytest.MonkeyPatch, blocks: int, status: str
) -> None:
    real = os.statvfs("/")
    found = os.statvfs_result((4096, 4096, blocks, blocks, blocks, *tuple(real)[5:]))
    monkeypatch.setattr(doctor_serving.os, "statvfs", lambda path: found)
    check = doctor_serving._shared_memory()
    assert check.status == status
    assert bool(check.advice) == (status == "optional")


@pytest.mark.parametrize(("hard", "status"), [(1024, "optional"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_few_open_files_are_named(monkeypatch: pytest.MonkeyPatch, hard: int, status: str) -> None:
    monkeypatch.setattr(doctor_serving.resource, "getrlimit", lambda which: (1024, hard))
    assert doctor_serving._open_files().status == status


def test_a_port_in_use_is_named_with_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(doctor_serving, "PORTS", {"health": taken.getsockname()[1]})
        (check,) = doctor_serving._ports()
    assert check.status == "optional" and "--health-port" in check.advice


@pytest.mark.parametrize(
    ("folder", "status"), [("plain", "ok"), ("two words", "optional"), ("say 'cheese'", "missing")]
)
def test_folders_that_compilers_cannot_be_given_are_named(
    folder: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvforge.common.build_paths.tempfile.gettempdir", lambda: str(tmp_path / folder))
    check = doctor._build_paths()
    assert check.status == status and (status == "ok" or folder.replace("'", "") in check.found.replace("'", ""))
    for spaces in (True, False):
        if status == "missing" or (status == "optional" and not spaces):
            with pytest.raises(BuildError, match="set TMPDIR"):
                check_paths(spaces=spaces)
        else:
            check_paths(spaces=spaces)


def test_the_diagnosis_of_this_machine_is_whole() -> None:
    checks = doctor.diagnose()
    names = [check.name for check in checks]
    assert len(set(names)) == len(names)
    assert {"python", "torch", "tritonserver", "numpy for Triton", "shared memory", "open files", "port 8003"} <= set(
        names
    )
    assert all(check.advice for check in checks if check.status != "ok")
    assert [check.name for check in checks if not check.needed_for] == ["CPU", "memory"]
