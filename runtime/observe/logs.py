"""Machine-readable logs: events, and a formatter that writes each as one line of JSON."""

import json
import logging
from datetime import datetime, timezone

_FIELDS = "llmc_fields"  # attribute of a log record; logging and other libraries do not set it


def event(logger: logging.Logger, name: str, /, level: int = logging.INFO, **fields: object) -> None:
    """Log an event: its name is the message; JsonFormatter also writes its ``fields``."""
    logger.log(level, name, extra={_FIELDS: fields}, stacklevel=2)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The data of an event; empty for any other record."""
    fields: dict[str, object] = getattr(record, _FIELDS, {})
    return fields


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON (RFC 8259, ASCII only).

    Keys: ``time`` (ISO 8601, UTC, microseconds), ``level``, ``logger``, ``message``, the fields of the event, and
    ``exception`` if there is one. Values that JSON lacks become text.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= fields_of(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
