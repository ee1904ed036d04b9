"""Log lines as JSON objects, tritonserver's own too, and what they say went wrong."""

import json
import re
import time
from typing import Any

TRITON_LINE = re.compile(r'(?P<level>[IWEF])\d{4} [\d:.]+ \d+ (?P<source>[^\]]+)\] "?(?P<message>.*?)"?$')
HARMLESS = ("CudaDriverHelper has not been initialized", "Non-graceful termination detected")
"""What every start without a GPU and every stop says of itself, as if something were wrong."""
FAILED_MODEL = re.compile(r"failed to load '(\w+)' version \d+: [A-Z][\w ]*: (.+)")
UNREADABLE_MODEL = re.compile(r"Poll failed for model directory '(\w+)': (.+)")
FAILED_SERVICE = re.compile(r"failed to start (\S+) service: (.+)", re.IGNORECASE)
OWN_SENTENCE = re.compile(r"(?:TritonModelException|KvforgeError|EngineError|EngineReplacedError): (.+)")
EXPLAINED = (
    (
        re.compile(r"Unable to initialize shared memory key .* Error: (.+)"),
        "/dev/shm has no room for a megabyte a model ({}): make room there, or give the container more with --shm-size",
    ),
    (re.compile(r"Stub process '(\w+?)(?:_\d+)+' is not healthy"), "the process of model '{}' ended while it loaded"),
)
"""What tritonserver says of a model that failed to load, and the same in a sentence."""
TRITON_LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}


def as_json(line: str) -> str:
    """A line of tritonserver's, or of anything else on its standard error, in the form of request_log.JsonFormatter; an
    object stays as it is."""
    if line.startswith("{"):
        return line
    entry = _entry(time.time(), "INFO", "tritonserver", line)
    if match := TRITON_LINE.match(line):
        entry |= {"level": TRITON_LEVELS[match["level"]], "message": match["message"], "source": match["source"]}
    return json.dumps(entry)


def is_harmless(line: str) -> bool:
    """Whether a healthy server says so, too."""
    return any(words in line for words in HARMLESS)


def failure_in_log(lines: list[str]) -> str | None:
    """The first cause why a server that starts will not serve all its models, as one line, or None."""
    for line in lines:
        if match := FAILED_MODEL.search(line) or UNREADABLE_MODEL.search(line):
            return _model_failure(match[1], match[2].split(r"\n\nAt:")[0].rstrip('"'))  # without Python's traceback
        if match := FAILED_SERVICE.search(line):
            return f"its {match[1]} port cannot be opened: {match[2].rstrip(chr(34))}"
    return None


def error_in_log(lines: list[str]) -> str:
    """What went wrong in tritonserver's own words, as one line."""
    if (failure := failure_in_log(lines)) is not None:
        return failure
    lines = [line for line in lines if not is_harmless(line)]
    errors = [line for line in lines if re.match(r"[EF]\d{4} |error:|terminate called|  what\(\):", line)]
    return (errors or lines or ["its log is empty"])[-1].strip()


def _model_failure(model: str, message: str) -> str:
    if match := OWN_SENTENCE.match(message):
        return match[1]
    for pattern, sentence in EXPLAINED:
        if match := pattern.match(message):
            return sentence.format(match[1])
    return f"model '{model}' failed to load: {message}"


def _entry(when: float, level: str, logger: str, message: str) -> dict[str, Any]:
    return {"time": round(when, 6), "level": level, "logger": logger, "message": message}
