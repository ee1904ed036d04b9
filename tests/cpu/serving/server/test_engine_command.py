"""The options of a server as its processes read them: from the engine process's command line and from serve.json."""

import json
import sys
from pathlib import Path

import pytest

from kvforge.common.errors import EngineError
from kvforge.common.exact_intervals import ExactTokens
from kvforge.common.records import RecordError, from_text, to_text
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.serving.engine.command import process_command
from kvforge.serving.options import SERVE_FILE, EngineOptions, ModelOptions, read_serve_file, write_serve_file
from kvforge.serving.server.options import ServerOptions
from kvforge.serving.stub.config import StubConfig
from kvforge.serving.triton_config import TritonConfig

GIVEN = [
    {},
    {"max_seq_len": 128, "log_level": "INFO", "log_format": "json", "manifest_sha256": "ab"},
    {"max_num_seqs": 3, "max_num_tokens": 64, "kv_cache_gib": 0.5, "enable_prefix_cache": False},
    {"prefix_dir": Path("/büro/\udcff"), "prefix_gib": 2.0},
    {"snapshot_every": 4, "num_snapshots": 7, "async_scheduling": True},
    {"early_exit_threshold": 0.75, "early_exit_prompts": True},
    {"speculative": SpeculativeConfig("ngram", 7, 3, 9)},
    {"speculative": SpeculativeConfig("draft_model", 2, draft_engine=Path("small"))},
    {"speculative": SpeculativeConfig("suffix", suffix_sharing="all")},
    {"speculative": SpeculativeConfig("early_exit", 6), "exact_tokens": ExactTokens(1, 2, 0.5)},
]


@pytest.mark.parametrize("given", GIVEN)
def test_the_engine_process_reads_what_the_server_was_given(given: dict) -> None:
    options = ServerOptions(**given, http_port=1, max_queue_size=3)
    read = from_text(EngineOptions, to_text(options, EngineOptions))
    assert read == EngineOptions(**given)
    assert read.of_engine() == {
        k: v for k, v in given.items() if k not in ("log_level", "log_format", "manifest_sha256")
    }


@pytest.mark.parametrize("given", [*GIVEN, {"wrap_token_ids": True, "engine_command": ("a", "ö \n"), "python": "é"}])
def test_the_models_read_what_the_server_was_given(tmp_path: Path, given: dict) -> None:
    write_serve_file(ServerOptions(**given, decoupled=False, stream_interval=5), tmp_path)
    assert read_serve_file(tmp_path) == ModelOptions(**given, stream_interval=5)


def test_a_server_that_was_started_by_hand_has_the_defaults(tmp_path: Path) -> None:
    assert read_serve_file(tmp_path) == ModelOptions()
    parameters = {name: {"string_value": str(tmp_path)} for name in ("gpt_model_path", "run_dir")}
    config = json.dumps({"input": [], "max_batch_size": 1, "parameters": parameters})
    args = {"model_name": "tensorrt_llm", "model_version": "1", "model_config": config}
    stub = StubConfig.of(TritonConfig.of(args))
    assert stub.engine_command == [*process_command(tmp_path), "--options", to_text(EngineOptions())]
    assert (stub.python, stub.exclude_input, stub.poll_s) == (sys.executable, True, 0.05)


@pytest.mark.parametrize(
    ("change", "what"), [({"colour": 1}, "unknown field colour"), ({"max_queue_size": "1"}, "impossible values")]
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: dict, what: str) -> None:
    write_serve_file(ServerOptions(), tmp_path)
    path = tmp_path / SERVE_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(EngineError, match=f"serve.json .*{what}.*; start kvforge serve again"):
        read_serve_file(tmp_path)
    path.write_text("{")
    with pytest.raises(EngineError, match="is no JSON"):
        read_serve_file(tmp_path)
    with pytest.raises(RecordError, match="lacks"):
        from_text(EngineOptions, "{}")
