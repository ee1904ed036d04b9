"""Every extra brings all that its command needs: each is installed alone, in a fresh environment (`--full`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvforge.common.errors import MissingToolError
from kvforge.common.extras import how_to_install, import_failed

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]
TEACHER = ROOT / "model_defs" / "assets" / "tiny-teacher"

COMMANDS = {
    "serve": ("kvforge demo --num-questions 2 -o demo",),
    "gguf": (
        'python -c \'import gguf, numpy; w = gguf.GGUFWriter("m.gguf", "llama"); w.add_context_length(8192); '
        "w.add_embedding_length(64); w.add_block_count(2); w.add_feed_forward_length(64); w.add_head_count(4); "
        'w.add_layer_norm_rms_eps(1e-5); w.add_tokenizer_model("gpt2"); w.add_token_list([str(i) for i in range(32)]); '
        'w.add_tensor("token_embd.weight", numpy.ones((32, 64), numpy.float32)); w.write_header_to_file(); '
        "w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()'",
        "kvforge plan --model m.gguf --input 512 --output 16",
    ),
    "client": ("kvforge generate http://127.0.0.1:9 --prompt x 2>&1 | grep 'nothing answers'",),
    "perf": ("kvforge plan --model TEACHER --cut 4 --plot plan.svg",),
    "train": (
        "kvforge rewire TEACHER rewired --cut-layer 4",
        'python -c \'import datasets, json; d = datasets.load_dataset("json", data_files="rows.jsonl"); '
        'd.save_to_disk("saved")\'',
        "kvforge distill rewired student --data saved --max-steps 1 --batch-size 1 --length 128",
    ),
    "eval": (
        "kvforge build TEACHER -o engine",
        "kvforge lm-eval engine --include-path . --tasks numbers",
    ),
    "onnx": ("kvforge build TEACHER -o engine --target tensorrt",),
    "tensorrt-rtx": ("kvforge build TEACHER -o engine --target tensorrt", "test -f engine/rank0/upper.plan"),
    "modelopt": (
        "kvforge quantize TEACHER -o quantized --recipe fp8 --num-samples 2 --num-tokens 32",
        "kvforge build quantized -o engine",
    ),
}
"""What each extra is for, in a folder with the files that `_write_inputs` makes."""
ELSEWHERE = {
    "tensorrt": "an NVIDIA GPU",
    "dev": "what runs this test",
}
TASK = """task: numbers
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
doc_to_text: prompt
output_type: multiple_choice
doc_to_target: 0
doc_to_choice: [one, two]
metric_list:
- {metric: acc}
"""


def test_every_extra_has_a_command_here() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras.keys() == COMMANDS.keys() | ELSEWHERE.keys()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extra", COMMANDS)
def test_an_extra_alone_runs_its_command(extra: str, tmp_path: Path, full: bool) -> None:
    if not full:
        pytest.skip("installs an environment; --full does")
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    binaries = environment / "bin"
    install = [str(binaries / "python"), "-m", "pip", "install", "--quiet", f"{ROOT}[{extra}]"]
    subprocess.run(install, check=True, cwd=tmp_path)
    _write_inputs(tmp_path)
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    outside["PATH"] = f"{binaries}:{outside['PATH']}"
    outside["HF_DATASETS_CACHE"] = str(tmp_path / "datasets")
    for command in (*COMMANDS[extra], "kvforge doctor"):
        line = command.replace("TEACHER", f"'{TEACHER}'")
        result = subprocess.run(line, shell=True, cwd=tmp_path, env=outside, capture_output=True, text=True)
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"


def _write_inputs(folder: Path) -> None:
    rows = [{"prompt": f"The number is {n}. It is", "completion": f" {n}."} for n in range(100, 160)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "numbers.yaml").write_text(TASK)


def test_an_absent_package_is_not_a_broken_one() -> None:
    absent = import_failed("Plots need matplotlib", "perf", ModuleNotFoundError("No module named 'matplotlib'"))
    assert str(absent) == f"Plots need matplotlib (No module named 'matplotlib'): {how_to_install('perf')}."
    broken = import_failed("Plots need matplotlib", "perf", ImportError("numpy.core.multiarray failed to import"))
    assert isinstance(broken, MissingToolError)
    assert "cannot be imported (ImportError: numpy.core.multiarray failed to import); kvforge doctor" in str(broken)


@pytest.mark.parametrize(
    ("files", "what"), [(("pyproject.toml",), "-e '.[serve]'"), ((), "'kvforge[serve]'")], ids=["source tree", "wheel"]
)
@pytest.mark.parametrize(
    ("pip", "command"), [([1], "pip install"), ([], "uv pip install --python '/an env/python'")], ids=["pip", "uv"]
)
def test_how_to_install_fits_where_kvforge_came_from(
    files: tuple[str, ...], what: str, pip: object, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr("kvforge.common.extras.SOURCE_TREE", tmp_path)
    monkeypatch.setattr("kvforge.common.extras.distributions", lambda name: pip)
    monkeypatch.setattr(sys, "executable", "/an env/python")
    assert how_to_install("serve") == f"{command} {what}"


def test_asking_for_pip_leaves_setuptools_importable() -> None:
    """Its finder takes a search for the module pip for a build of pip's."""
    code = "from kvforge.common.extras import how_to_install; how_to_install('serve'); import setuptools"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
