"""Engine directories of any name: Triton's models read a link of a plain name, and nothing else changes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tritonclient.grpc", reason="reads Triton's configuration format")

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from kvforge.common.errors import EngineError
from kvforge.manifest import load_manifest
from kvforge.serving.engine.command import process_command
from kvforge.serving.options import read_serve_file
from kvforge.serving.server.options import ServerOptions
from kvforge.serving.server.repository import ENGINE_LINK, MODELS, materialise

NAMES = [
    "plain", "with space", 'quo"te', "apo'strophe", "new\nline", "tab\there", "back\\slash", "${engine_dir}", "$(id)",
    '" } } backend: "evil', "ünïcode 日本", "a;b|c&d", "--option", "control\x01", "trail\\",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names(tmp_path: Path, name: str) -> None:
    engine = tmp_path / name
    engine.mkdir()
    link = tmp_path / "run" / ENGINE_LINK
    command = process_command(engine)
    assert command[3] == str(engine)
    materialise(tmp_path / "run" / "models", engine, 4, ServerOptions(engine_command=tuple(command)))
    assert read_serve_file(tmp_path / "run").engine_command == tuple(command)
    for model in MODELS:
        text = (tmp_path / "run" / "models" / model / "config.pbtxt").read_text(encoding="utf-8")
        config = text_format.Parse(text, model_config_pb2.ModelConfig())
        assert config.name == model
        assert config.backend == "python"
        values = {key: value.string_value for key, value in config.parameters.items()}
        if model == "tensorrt_llm":
            assert values["gpt_model_path"] == str(link)
        if "tokenizer_dir" in values:
            assert values["tokenizer_dir"] == str(link / "tokenizer")
    assert link.samefile(engine)


ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
"""With these a Python knows file names as Triton's stubs do, whatever the locale."""
AS_A_STUB = """
import json, os, subprocess, sys
from pathlib import Path
assert sys.getfilesystemencoding() == "ascii"
exec(Path(sys.argv[1]).read_text().partition("triton_python_backend_utils")[0].rpartition("\\n")[0])
import module_of_a_folder
from kvforge.serving.stub.config import StubConfig
from kvforge.serving.triton_config import TritonConfig
config = StubConfig.of(TritonConfig.of({"model_name": "", "model_version": "1", "model_config": sys.argv[2]}))
assert (config.tokenizer_dir / "tokenizer.json").read_text() == "{}"
for command in (config.engine_command, [config.python, "-c", "print('ran')"]):
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "ran\\n"
"""


def test_a_stub_reads_and_starts_all_though_it_knows_names_in_ascii_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine, its process, the interpreter, and modules in folders with names of any language."""
    engine, folder = tmp_path / "mödels 日本", tmp_path / "jörg"
    (engine / "tokenizer").mkdir(parents=True)
    (engine / "tokenizer" / "tokenizer.json").write_text("{}")
    folder.mkdir()
    (folder / "module_of_a_folder.py").write_text("")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "executable", str(python))
    program = "import os, sys; assert os.path.isdir(sys.argv[1]), sys.argv; print('ran')"
    options = ServerOptions(engine_command=(str(python), "-c", program, str(engine)), python=str(python))
    materialise(tmp_path / "run" / "models", engine, 4, options)
    model = tmp_path / "run" / "models" / "tensorrt_llm"
    config = text_format.Parse((model / "config.pbtxt").read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    parameters = {key: {"string_value": value.string_value} for key, value in config.parameters.items()}
    described = json.dumps({"input": [], "max_batch_size": 4, "parameters": parameters})
    command = [os.path.realpath("/proc/self/exe"), "-c", AS_A_STUB, str(model / "1" / "model.py"), described]
    stub = subprocess.run(command, env={**os.environ, **ASCII}, capture_output=True, text=True)
    assert stub.returncode == 0, stub.stderr


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="is not UTF-8 text; rename"):
        load_manifest(tmp_path / "\udcff")
