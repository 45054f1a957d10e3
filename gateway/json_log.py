"""Log lines as JSON objects, one a line: time, level, logger, message, and what a line carries besides."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import orjson

FIELDS = "fields"
"""Name of the record's attribute, set with `extra`, that has more to say: an object."""


class JsonFormatter(logging.Formatter):
    """For logging handlers."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()
