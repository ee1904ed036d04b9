"""Engines with plans as the product makes them: built by a command without a GPU, shown, and refused where they cannot
run."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from kvforge.common.errors import BuildError, EngineError
from kvforge.compiler import tensorrt_process
from kvforge.compiler.build import build_engine
from kvforge.compiler.options import BuildOptions, ResolvedOptions
from kvforge.compiler.targets import tensorrt
from kvforge.kv_policies import parse
from kvforge.manifest import load_manifest, load_plans, save_manifest, verify_files
from kvforge.tensorrt import compatibility, rtx
from tests.support.models.checkpoints import make_checkpoint
from tests.support.sessions.fake import fake_manifest
from tests.support.tensorrt.rtx import ask_rtx

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ResolvedOptions("tensorrt", "bfloat16", "bfloat16", 8, 100, 1000, 32)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the script, with a recipe, in a process that has no other TensorRT."""
    pytest.importorskip("tensorrt_rtx_libs")
    folder = tmp_path_factory.mktemp("engine")
    checkpoint = make_checkpoint(folder / "checkpoint", cut=1, num_hidden_layers=2, dtype=torch.bfloat16)
    recipe = folder / "recipe.yaml"
    lines = [f"checkpoint: {checkpoint}", f"output: {folder / 'engine'}", "target: tensorrt", "page_size: 8"]
    recipe.write_text("\n".join([*lines, "compute_capabilities: '12.0, 8.9'", "max_num_seqs: 4", "kv_dtype: fp8\n"]))
    result = run("build/build_tensorrt.py", "--recipe", recipe)
    assert result.returncode == 0, result.stderr
    assert "ONNX only" not in result.stdout
    return folder / "engine"


def test_the_manifest_says_what_built_the_plans(engine: Path) -> None:
    manifest = load_manifest(engine)
    verify_files(engine, manifest)
    assert {f"rank0/{graph}.{ending}" for graph in ("lower", "upper") for ending in ("onnx", "plan")} < set(
        manifest.files
    )
    assert (manifest.isa, manifest.plan_builder) == (("tensorrt-rtx",), "tensorrt-rtx")
    assert manifest.plan_capabilities == ("8.9", "12.0") and manifest.plan_version and not manifest.plan_is_portable
    attends = ("PagedAttentionCombineDynamic", "PagedAttentionPartialDynamic")
    assert manifest.plan_plugins == (*attends, "RopePagedKvWriteDynamic")
    plans = load_plans(engine, manifest)
    assert plans.keys() == {"lower", "upper"}
    assert all(plan["plan_bytes"] == (engine / f"rank0/{name}.plan").stat().st_size for name, plan in plans.items())


def test_inspect_shows_the_plans(engine: Path) -> None:
    shown = run("-m", "kvforge", "inspect", engine, "--verify").stdout
    assert "TensorRT for RTX 1." in shown and "compute capability 8.9, 12.0" in shown
    assert "\n  lower " in shown and "\n  upper " in shown and "KiB weights; " in shown


def test_loading_without_a_gpu_is_one_sentence(engine: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    result = run("-m", "kvforge", "generate", engine, "--prompt", "Hello")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "runs on an NVIDIA GPU and there is none; run it where one is" in result.stderr


PLANS = dataclasses.replace(
    fake_manifest(), plan_builder="tensorrt-rtx", plan_version="1.7.1.116", plan_capabilities=("8.9", "12.0")
)


@pytest.mark.parametrize(
    ("changes", "version", "capability", "message"),
    [
        ({}, "1.7.1.116", (8, 9), ""),
        ({}, "1.7.2.5", (12, 0), ""),
        ({"plan_is_portable": True}, "1.7.2.5", (9, 0), ""),
        ({"plan_is_portable": True}, "1.7.2.5", (12, 1), ""),
        ({"plan_builder": None}, "1.7.1.116", (7, 5), ""),
        ({"plan_builder": "tensorrt"}, "1.7.1.116", (8, 9), "has plans of TensorRT, and here TensorRT for RTX is used"),
        ({}, "1.8.0.1", (8, 9), r"has plans of TensorRT for RTX 1\.7\.1\.116, and this is 1\.8\.0\.1; install that"),
        ({}, "1.7.1.116", (8, 6), r"compute capability 8\.9, 12\.0, and this one has 8\.6; rebuild the engine for it"),
        ({}, "1.7.1.116", (9, 0), r"compute capability 8\.9, 12\.0, and this one has 9\.0; rebuild the engine for it"),
        ({}, "1.7.1.116", (12, 1), r"compute capability 8\.9, 12\.0, and this one has 12\.1"),
        ({"plan_is_portable": True}, "1.7.1.116", (8, 6), r"capability 8\.9, 12\.0 and later, and this one has 8\.6"),
    ],
)
def test_plans_of_another_machine(
    changes: dict[str, object],
    version: str,
    capability: tuple[int, int],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compatibility, "flavour", lambda: rtx)
    manifest = dataclasses.replace(PLANS, **changes)

    def check() -> None:
        compatibility.check_builder(manifest, Path("engine"), version)
        compatibility.check_gpu(manifest, Path("engine"), capability)

    if not message:
        check()
        return
    with pytest.raises(EngineError, match=message):
        check()


def test_what_needs_no_gpu_is_said_without_one(engine: Path) -> None:
    """Plans of another release."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    other = shutil.copytree(engine, engine.with_name("other"))
    save_manifest(dataclasses.replace(load_manifest(other), plan_version="1.5.0.1"), other)
    result = run("-m", "kvforge", "generate", other, "--prompt", "Hello")
    assert result.returncode == 1 and "has plans of TensorRT for RTX 1.5.0.1, and this is 1." in result.stderr
    shutil.rmtree(other)


@pytest.mark.parametrize(
    ("asked", "kv_dtype", "chosen"),
    [
        ("auto", torch.bfloat16, (80, 86, 89, 120)),
        ("auto", torch.float8_e4m3fn, (89, 120)),
        ("8.0", torch.int8, (80,)),
        ("12.0, 8.9", torch.float8_e4m3fn, (89, 120)),
        ("8.0,8.9", torch.float8_e4m3fn, r"FP8 KV cache needs compute capability 8\.9, and this is 8\.0"),
        (
            "9.0",
            torch.bfloat16,
            r"'9\.0' is not one that TensorRT for RTX builds for; choose auto, current, or so",
        ),
        ("", torch.bfloat16, "'' is not one"),
        ("current", torch.bfloat16, "needs a GPU, and there is none here"),
    ],
)
def test_compute_capabilities(
    asked: str, kv_dtype: torch.dtype, chosen: tuple[int, ...] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if isinstance(chosen, tuple):
        assert rtx.capabilities(asked, kv_dtype) == chosen
        return
    with pytest.raises(BuildError, match=chosen):
        rtx.capabilities(asked, kv_dtype)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compute_capabilities": "9.0"}, "'9.0' is not one"),
        ({"compute_capabilities": "8.0", "kv_dtype": "fp8"}, "FP8"),
    ],
)
def test_gpus_are_refused_before_any_work(
    given: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint", cut=1, num_hidden_layers=2, dtype=torch.bfloat16)
    monkeypatch.setattr(tensorrt, "builds_plans", lambda: True)
    monkeypatch.setattr(tensorrt, "flavour", lambda: rtx)
    stages: list[str] = []
    with pytest.raises(BuildError, match=message):
        build_engine(
            checkpoint, tmp_path / "engine", BuildOptions("tensorrt", max_num_seqs=4, **given), progress=stages.append
        )
    assert stages == ["read"] and not (tmp_path / "engine").exists()


def test_a_killed_builder_leaves_nothing(tmp_path: Path) -> None:
    """The libraries are loaded by links that all processes share."""
    pytest.importorskip("tensorrt_rtx_libs")
    program = "import os, signal; from kvforge.tensorrt import rtx; rtx.load(); os.kill(os.getpid(), signal.SIGKILL)"
    scratch, cache = tmp_path / "tmp", tmp_path / "cache"
    scratch.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch), "KVFORGE_CACHE": str(cache)}
    for _ in range(2):
        result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=False)
        assert result.returncode == -signal.SIGKILL
    assert not list(scratch.glob("kvforge-*"))
    (folder,) = (cache / "tensorrt-rtx").iterdir()
    assert len(list(folder.iterdir())) == 3 and all(link.exists() for link in folder.iterdir())


def test_links_where_the_cache_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVFORGE_CACHE", str(tmp_path / "file" / "cache"))
    folder = rtx.links_folder(tmp_path)
    assert isinstance(folder, tempfile.TemporaryDirectory)
    assert len(list(Path(folder.name).iterdir())) == 3
    folder.cleanup()


def test_rtx_knows_these_gpus() -> None:
    names = [f"trt.ComputeCapability.SM{capability}" for capability in rtx.KNOWN]
    assert ask_rtx("api_names", {"names": names}) == {"unknown": []}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 3", r"ended without a plan \(exit code 3\)"),
        ("cat > /dev/null; kill -ABRT $$", r"ended without a plan \(SIGABRT\)"),
        ("""cat > /dev/null; echo '{"error": "No kernel."}'""", r"^No kernel\.$"),
    ],
)
def test_a_builder_that_ends(script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(tensorrt_process.sys, "executable", str(program))
    with pytest.raises(BuildError, match=message):
        tensorrt_process.build_plans_apart(tmp_path, OPTIONS, lambda stage: None)


@pytest.mark.parametrize("policy", ["full", "snapkv:window=8", "shadowkv:rank=8,chunk_size=4,sparse_budget=32"])
def test_the_builder_gets_the_options(policy: str) -> None:
    options = dataclasses.replace(OPTIONS, kv_scales=((1.5, 2.0),), policy=parse(policy), early_exit=True)
    assert tensorrt_process._from_json(tensorrt_process._as_json(options)) == options


def test_the_builders_stages_and_answer_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, seen = tmp_path / "python", []
    lines = """{"stage": "build lower"}\n{"built": {"plan_builder": "x", "plan_plugins": ["A", "B"]}}"""
    program.write_text(f"#!/bin/sh\ncat > /dev/null\ncat <<END\n{lines}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setattr(tensorrt_process.sys, "executable", str(program))
    built = tensorrt_process.build_plans_apart(tmp_path, OPTIONS, seen.append)
    assert seen == ["build lower"] and built == {"plan_builder": "x", "plan_plugins": ("A", "B")}


def test_a_plan_that_cannot_be_written_whole_is_none(engine: Path) -> None:
    """TensorRT calls a plan built although writes of it fail."""
    limit = (engine / "rank0" / "lower.plan").stat().st_size - 1
    assert limit > (engine / "rank0" / "weights.safetensors").stat().st_size
    output, program = engine.with_name("truncated"), (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))\n"
        "from kvforge.cli import main\n"
        "sys.exit(main(['build', sys.argv[2], '-o', sys.argv[3], '--target', 'tensorrt', '--kv-dtype', 'fp8',\n"
        "               '--page-size', '8', '--max-num-seqs', '4', '--compute-capabilities', '12.0,8.9']))\n"
    )  # fmt: skip
    result = run("-c", program, limit, engine.with_name("checkpoint"), output)
    assert result.returncode == 1
    assert "lower.plan cannot be written (File too large); make room for it." in result.stderr
    assert not output.exists()
