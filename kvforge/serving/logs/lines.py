"""Log lines as JSON objects, tritonserver's own too, and what they say went wrong."""

import json
import re
import time
from typing import Any

TRITON_LINE = re.compile(r'(?P<level>[IWEF])\d{4} [\d:.]+ \d+ (?P<source>[^\]]+)\] "?(?P<message>.*?)"?$')
HARMLESS = "CudaDriverHelper has not been initialized"
"""What every start without a GPU says among its errors."""
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


def error_in_log(lines: list[str]) -> str:
    """What went wrong in tritonserver's own words, as one line."""
    for line in lines:
        if match := re.search(r"failed to load '\w+' version \d+: \w+: (?:TritonModelException: )?(.+)", line):
            return match.group(1).split(r"\n\nAt:")[0]  # without the Python traceback behind it
    lines = [line for line in lines if HARMLESS not in line]
    errors = [line for line in lines if re.match(r"[EF]\d{4} |error:|terminate called|  what\(\):", line)]
    return (errors or lines or ["its log is empty"])[-1].strip()


def _entry(when: float, level: str, logger: str, message: str) -> dict[str, Any]:
    return {"time": round(when, 6), "level": level, "logger": logger, "message": message}
