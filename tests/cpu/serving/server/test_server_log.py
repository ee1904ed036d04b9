"""The server's log: lines as JSON, what went wrong in one line, and a disk that is full."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.serving.logs.lines import as_json, error_in_log, failure_in_log
from kvforge.serving.logs.pump import LogPump, LogSink, log_to

TRITON_ERROR = 'E1121 19:40:36.739988 14064 server.cc:241] "no CUDA driver"'
HARMLESS = 'E1125 1 2 server.cc:241] "CudaDriverHelper has not been initialized."'


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


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("failed to load 'm' version 1: Internal: EngineError: no such file; rebuild\\n\\nAt:\\n  x.py(3)",
         "no such file; rebuild"),
        ('failed to load \'m\' version 1: Internal: Stub process \'m_0_0\' is not healthy."',
         "the process of model 'm' ended while it loaded"),
        ("failed to load 'm' version 1: Internal: Unable to initialize shared memory key 'k' to requested size (1). "
         'If you are. Error: No space left on device"',
         "/dev/shm has no room for a megabyte a model (No space left on device): make room there, or give the "
         "container more with --shm-size"),
        ("failed to load 'm' version 1: Not found: unable to load shared library: x.so: failed to map segment",
         "model 'm' failed to load: unable to load shared library: x.so: failed to map segment"),
        ("failed to load 'm' version 1: Internal: ModuleNotFoundError: No module named 'x'\\n\\nAt:\\n  x.py(3)",
         "model 'm' failed to load: ModuleNotFoundError: No module named 'x'"),
        ("Poll failed for model directory 'm': failed to read text proto from m/config.pbtxt",
         "model 'm' failed to load: failed to read text proto from m/config.pbtxt"),
        ("failed to start HTTP service: Unavailable - no such device",
         "its HTTP port cannot be opened: Unavailable - no such device"),
    ],
)  # fmt: skip
def test_the_first_cause_is_one_sentence_while_others_follow(line: str, words: str) -> None:
    after = "E1121 1 2 a.cc:1] failed to load 'other' version 1: Internal: EngineError: a consequence"
    assert failure_in_log([TRITON_ERROR, line, after, "end"]) == words
    assert error_in_log([TRITON_ERROR, line, after, "end"]) == words


def test_a_start_that_goes_on_has_no_failure() -> None:
    assert failure_in_log([]) is None
    assert failure_in_log([TRITON_ERROR, "the engine is ready"]) is None


def test_a_crash_has_its_own_words_and_what_every_start_says_is_no_error() -> None:
    crash = ["terminate called after throwing an instance of 'boost::interprocess::lock_exception'", "  what():  lock"]
    assert error_in_log([HARMLESS, *crash, "Signal (6) received."]) == "what():  lock"
    assert error_in_log([HARMLESS, "the engine is ready"]) == "the engine is ready"
    assert error_in_log([HARMLESS]) == "its log is empty"


def test_a_pump_keeps_and_converts_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader, writer = os.pipe()
    pump = LogPump(os.fdopen(reader, "rb"), LogSink(path, "json"))
    os.write(writer, f"{TRITON_ERROR}\n{HARMLESS}\nhalf a ".encode())
    os.write(writer, b"line \xff")
    os.close(writer)
    pump.join(30)
    assert pump.lines() == [TRITON_ERROR, HARMLESS, "half a line \ufffd"]
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


LOGS = """
import logging, sys
from kvforge.serving.logs.request_log import configure
assert sys.stderr.encoding != "utf-8"
configure("text", "WARNING")
logging.getLogger("kvforge").warning("m\\u00f6dels \\u65e5\\u672c \\udcff")
"""


def test_a_log_is_utf_8_whatever_the_locale() -> None:
    """That of a stub, whose locale is C for good, and what cannot be encoded is escaped."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    stub = subprocess.run([sys.executable, "-c", LOGS], env=environment, capture_output=True)
    assert stub.stderr.decode().endswith("kvforge WARNING mödels 日本 \\udcff\n"), stub.stderr
