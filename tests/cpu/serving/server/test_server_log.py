"""The server's log: lines as JSON, what went wrong in one line, and a disk that is full."""

import json
import logging
import os
from pathlib import Path

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.serving.logs.lines import as_json, error_in_log
from kvforge.serving.logs.pump import LogPump, LogSink, log_to

TRITON_ERROR = 'E1121 19:40:36.739988 14064 server.cc:241] "no CUDA driver"'


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (TRITON_ERROR, {"level": "ERROR", "logger": "tritonserver", "message": "no CUDA driver",
                        "source": "server.cc:241"}),
        ("Signal (15) received.", {"level": "INFO", "logger": "tritonserver", "message": "Signal (15) received."}),
        ('{"level": "INFO", "id": "a"}', {"level": "INFO", "id": "a"}),
    ],
)  # fmt: skip
def test_lines_become_objects(line: str, expected: dict) -> None:
    found = json.loads(as_json(line))
    assert {name: value for name, value in found.items() if name != "time"} == expected


def test_the_models_own_sentence_is_found() -> None:
    line = "E1121 1 2 a.cc:1] failed to load 'm' version 1: Internal: TritonModelException: no room\\n\\nAt:\\n x"
    assert error_in_log([TRITON_ERROR, line, "end"]) == "no room"
    assert error_in_log(["start", TRITON_ERROR, "end"]) == TRITON_ERROR
    assert error_in_log([]) == "its log is empty"


def test_a_crash_has_its_own_words_and_what_every_start_says_is_no_error() -> None:
    every = 'E1125 1 2 server.cc:241] "CudaDriverHelper has not been initialized."'
    crash = ["terminate called after throwing an instance of 'boost::interprocess::lock_exception'", "  what():  lock"]
    assert error_in_log([every, *crash, "Signal (6) received."]) == "what():  lock"
    assert error_in_log([every, "the engine is ready"]) == "the engine is ready"
    assert error_in_log([every]) == "its log is empty"


def test_a_pump_keeps_and_converts_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader, writer = os.pipe()
    pump = LogPump(os.fdopen(reader, "rb"), LogSink(path, "json"))
    os.write(writer, f"{TRITON_ERROR}\nhalf a ".encode())
    os.write(writer, b"line \xff")
    os.close(writer)
    pump.join(30)
    assert pump.lines() == [TRITON_ERROR, "half a line \ufffd"]
    assert [json.loads(line)["message"] for line in path.read_text().splitlines()] == [
        "no CUDA driver",
        "half a line \ufffd",
    ]


def test_a_full_disk_loses_lines_and_says_so_once(capfd: pytest.CaptureFixture[str]) -> None:
    sink = LogSink(Path("/dev/full"))
    for _ in range(3):
        sink.write("a line")
    sink.close()
    sink.write("after the end")
    errors = capfd.readouterr().err
    assert errors == "kvforge: the log /dev/full cannot be written (No space left on device); lines are lost\n"


def test_own_records_go_to_the_sink_while_it_is_entered(tmp_path: Path) -> None:
    logger = logging.getLogger("kvforge.serve")
    with log_to(LogSink(tmp_path / "log", "json"), "INFO"):
        logger.info("draining")
        logger.debug("not this")
    logger.error("nor this")
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert json.loads(line)["message"] == "draining" and json.loads(line)["level"] == "INFO"


def test_a_log_file_that_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(KvforgeError, match="give another --log-file"):
        LogSink(tmp_path)
