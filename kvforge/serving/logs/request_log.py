"""The log of a model's process: text for people or one JSON object a line for machines.

Every finished or refused request is one line of the logger `kvforge.requests`, with its numbers as fields.
"""

import io
import json
import logging
import sys
from typing import Any

TEXT, JSON = "text", "json"
_requests = logging.getLogger("kvforge.requests")
_FIELDS = "fields"


def configure(log_format: str, level: str) -> None:
    """Send this process's log to its standard error, in UTF-8 whatever the locale. Called once, before anything is
    logged."""
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == JSON else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def logs_requests() -> bool:
    """Whether a line for a request would be kept."""
    return _requests.isEnabledFor(logging.INFO)


def log_request(model: str, request_id: str, status: str, **fields: Any) -> None:
    """One line for a request that has ended; fields that are None are left out."""
    if not logs_requests():
        return
    known = {name: value for name, value in fields.items() if value is not None}
    _requests.info("request", extra={_FIELDS: {"model": model, "id": request_id, "status": status, **known}})


class TextFormatter(logging.Formatter):
    """Time, logger, level, message, then the fields as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(name)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = getattr(record, _FIELDS, {})
        return " ".join([super().formatMessage(record), *(f"{name}={_plain(v)}" for name, v in fields.items())])


class JsonFormatter(logging.Formatter):
    """One JSON object: time (seconds since 1970), level, logger, message, the fields, and an exception's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": round(record.created, 6),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def _plain(value: Any) -> str:
    """A value that stays one word on one line: clients choose request ids."""
    return value if isinstance(value, str) and value.isalnum() else json.dumps(value)
