"""Engine directories of any name: what Triton reads is the name, and nothing else changes in its configuration."""

import json
from pathlib import Path

import pytest

pytest.importorskip("tritonclient.grpc", reason="reads Triton's configuration format")

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from kvforge.common.errors import KvforgeError
from kvforge.serving.server.options import ServerOptions, engine_command
from kvforge.serving.server.repository import MODELS, materialise

NAMES = [
    "plain", "with space", 'quo"te', "apo'strophe", "new\nline", "tab\there", "back\\slash", "${engine_dir}", "$(id)",
    '" } } backend: "evil', "ünïcode 日本", "a;b|c&d", "--option", "control\x01", "trail\\",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names(tmp_path: Path, name: str) -> None:
    engine = tmp_path / name
    options = ServerOptions()
    command = engine_command(engine, options)
    assert command[3] == str(engine)
    materialise(tmp_path / "run" / "models", engine, command, 4, options.request_limits)
    for model in MODELS:
        text = (tmp_path / "run" / "models" / model / "config.pbtxt").read_text(encoding="utf-8")
        config = text_format.Parse(text, model_config_pb2.ModelConfig())
        assert config.name == model
        assert config.backend == "python"
        values = {key: value.string_value for key, value in config.parameters.items()}
        if model == "tensorrt_llm":
            assert values["gpt_model_path"] == str(engine)
            assert json.loads(values["engine_command"]) == command
        if "tokenizer_dir" in values:
            assert values["tokenizer_dir"] == str(engine / "tokenizer")


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    engine = tmp_path / "\udcff"
    with pytest.raises(KvforgeError, match="is not UTF-8 text; rename"):
        materialise(tmp_path / "run" / "models", engine, ["engine"], 4)
