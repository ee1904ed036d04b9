"""Who is let in, which parameters are known, what the state file says, and how large a request may be."""

import json
import resource
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvforge.serving.contract.failures import UnavailableError
from kvforge.serving.contract.parameters import check_parameters, read_parameters, timeout_s
from kvforge.serving.contract.request import GenerationRequest
from kvforge.serving.contract.size_limits import SizeLimits
from kvforge.serving.processes import run_dir
from kvforge.serving.processes.run_dir import StateReader, ask_to_drain
from kvforge.serving.processes.state_files import LENGTH, StateWriter, drain_deadline
from kvforge.serving.stub.active import ActiveRequest
from kvforge.serving.stub.admission import Admission
from kvforge.serving.stub.open_requests import OpenRequests
from tests.support.serving.refusals import refused


def request(parameters: dict | None = None, timeout: int = 0) -> SimpleNamespace:
    """As Triton's Python backend gives it."""
    text = json.dumps(parameters) if parameters is not None else ""
    return SimpleNamespace(parameters=lambda: text, timeout=lambda: timeout)


def test_the_queue_is_bounded_but_one_request_always_fits() -> None:
    admission = Admission(max_queue_size=3)
    admission.max_num_seqs = 2
    admission.enter(12)
    with pytest.raises(UnavailableError, match="Exceeds maximum queue size, the queue is full: 12 sequences"):
        admission.enter(1)
    admission.leave(12)
    for _ in range(5):
        admission.enter(1)
    with pytest.raises(UnavailableError, match="2 may run and 3 wait"):
        admission.enter(1)
    admission.leave(1)
    admission.enter(1)
    admission.closed = True
    with pytest.raises(UnavailableError, match="shutting down"):
        admission.enter(1)


def test_unknown_parameters_are_named_and_triton_s_are_not() -> None:
    known = {"timeout": 5, "priority": 1, "id": "x", "sequence_id": 1, "triton_enable_empty_final_response": True}
    check_parameters(known, ["top_p"])
    with refused(r"'topp' is no input .*; did you mean 'top_p'"):
        check_parameters({**known, "topp": 1}, ["top_p", "top_k"])
    with refused(r"'zzz' is no input of this model and no request parameter$"):
        check_parameters({"zzz": 1}, ["top_p"])


@pytest.mark.parametrize(
    ("parameters", "timeout", "expected"),
    [(None, 0, None), ({}, 250_000, 0.25), ({"timeout": 1_500_000}, 0, 1.5), ({"timeout": "2000000"}, 0, 2.0),
     ({"timeout": 0}, 0, None)],
)  # fmt: skip
def test_timeouts_are_microseconds(parameters: dict | None, timeout: int, expected: float | None) -> None:
    made = request(parameters, timeout)
    assert timeout_s(made, read_parameters(made)) == expected


@pytest.mark.parametrize("timeout", [-5, -1, -(2**63)])
def test_a_negative_timeout_over_grpc_arrives_as_a_huge_one(timeout: int) -> None:
    with refused(f"'timeout' is {timeout}; give whole microseconds of at least 0"):
        timeout_s(request({}, timeout % 2**64), {})
    assert timeout_s(request({}, 2**63 - 1), {}) == pytest.approx(2**63 / 1e6)


@pytest.mark.parametrize("value", [-1, "soon", "-3", float("inf"), float("nan")])
def test_impossible_timeouts(value: object) -> None:
    with refused("'timeout'"):
        timeout_s(request(), {"timeout": value})


def test_the_state_file_is_written_on_changes_and_keeps_since(tmp_path: Path) -> None:
    writer = StateWriter(tmp_path)
    path = tmp_path / "state.json"
    writer.write("loading", 5, 0)
    first = json.loads(path.read_text())
    path.unlink()
    writer.write("loading", 5, 0)
    assert not path.exists()
    writer.write("loading", 5, 3)
    second = json.loads(path.read_text())
    assert (second["active"], second["since"]) == (3, first["since"])
    writer.write("ready", 5, 3)
    third = json.loads(path.read_text())
    assert third["engine"] == "ready"
    assert third["since"] > first["since"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_the_drain_file(tmp_path: Path) -> None:
    assert drain_deadline(tmp_path) is None
    ask_to_drain(tmp_path, 2.5)
    assert drain_deadline(tmp_path) == 2.5
    (tmp_path / "drain").write_text("nonsense")
    assert drain_deadline(tmp_path) == 0.0


def test_a_moment_without_descriptors_is_no_drain(tmp_path: Path) -> None:
    ask_to_drain(tmp_path, 2.5)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        deadline = drain_deadline(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert deadline is None
    assert drain_deadline(tmp_path) == 2.5


def test_why_the_engine_failed_is_in_the_state_file_which_keeps_its_length(tmp_path: Path) -> None:
    writer, reader = StateWriter(tmp_path), StateReader(tmp_path)
    for reason in (None, "no room", "\x00" * 10**6, "\N{PILE OF POO}" * 10**6):
        writer.write("failed", None, 0, reason=reason)
        assert (tmp_path / "state.json").stat().st_size == LENGTH
        state = reader.read()
        assert state is not None and state.reason == (reason and reason[:300])


def test_a_reader_that_did_not_run_itself_does_not_call_the_stub_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(run_dir.time, "monotonic", lambda: now)
    StateWriter(tmp_path).write("ready", 5, 0)
    often, seldom = StateReader(tmp_path, longest_look_s=1.0), StateReader(tmp_path)
    assert not any(state.is_frozen for reader in (often, seldom) if (state := reader.read()))
    now += 60
    ages = [state.age_s for reader in (often, seldom) if (state := reader.read())]
    assert ages == [1.0, 60.0]
    for _ in range(50):
        now += 0.1
        state = often.read()
    assert state is not None and state.is_frozen and state.problem == run_dir.SILENT


def test_size_limits() -> None:
    limits = SizeLimits(max_request_bytes=100, vocab_size=8)
    limits.check_tensors({"input_ids": np.zeros((1, 25), np.int32)})
    with refused("104 bytes, but at most 100"):
        limits.check_tensors({"input_ids": np.zeros((1, 26), np.int32)})
    with refused("at most 100"):
        limits.check_tensors({"stop_strings": np.array([[b"a" * 60, b"b" * 60]], dtype=object)})
    limits.check_tensors({"stop_strings": np.array([[b"a" * 40, b"b" * 40]], dtype=object)})
    with refused("at most 100"):
        limits.check_tensors({"stop_strings": np.full((1, 13), b"", dtype=object)})
    with refused(r"'embedding_bias' .*has 7 numbers a prompt, but .* has 8"):
        limits.check_tensors({"embedding_bias": np.zeros((1, 7), np.float32)})
    prompt = GenerationRequest([1], False, True, return_generation_logits=True, params={"max_tokens": 10**9})
    with refused("'return_generation_logits' asks for 30517 MiB"):
        limits.check_logits([prompt])


def test_a_key_in_use_is_refused_and_its_owner_stays() -> None:
    requests = OpenRequests()
    first, second = (ActiveRequest(7, "id", None, [GenerationRequest([1], True, True)], frozenset()) for _ in range(2))
    requests.add(first)
    with refused("'stream_key' is another request's"):
        requests.add(second)
    assert requests.by_engine_id("7.0") is first
    assert requests.with_client_id("id") == [first]
    assert requests.with_client_id("") == []
    assert requests.remove(first)
    assert not requests.remove(first)
    assert len(requests) == 0
