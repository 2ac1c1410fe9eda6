"""Where kvreg's log goes: to the application's logging, or, where the application set none up for it, to a stream.

Only who runs kvreg calls this (the connector, the command line), never an import. The root logger, structlog's
configuration and the engine's and LMCache's loggers stay as they are.
"""

import logging
import sys
import traceback
from typing import TextIO

from metrics.events import LOGGER_NAME, line_processors, renderer

LEVEL = logging.INFO


def set_up_logs(*, as_json: bool = True, stream: TextIO | None = None) -> None:
    """Have kvreg's log written to `stream`, by default standard error, one line a record, unless a handler has it already.

    Calling it again changes nothing, so every connector of a process may.
    """
    logger = logging.getLogger(LOGGER_NAME)
    if logger.level == logging.NOTSET:
        logger.setLevel(LEVEL)
    if logger.hasHandlers():
        return
    output = logging.StreamHandler(stream or sys.stderr)
    output.setFormatter(LineFormatter(as_json=as_json))
    logger.addHandler(output)


class LineFormatter(logging.Formatter):
    """One line a record: events as they are, any other record of kvreg as an event with its logger's name.

    Such a record's text becomes the event; of an exception it keeps the type and the place, not the words, which may
    quote what must not be logged. In a run's context it names the run.
    """

    def __init__(self, *, as_json: bool = True) -> None:
        super().__init__()
        self._render = renderer(as_json=as_json)

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        if record.name == LOGGER_NAME:
            return record.getMessage()
        event = {"event": record.getMessage(), "logger": record.name, **_raised(record)}
        for step in line_processors():
            event = dict(step(None, record.levelname.lower(), event))  # type: ignore[arg-type]
        return str(self._render(None, record.levelname.lower(), event))


def _raised(record: logging.LogRecord) -> dict[str, str]:
    """The type of a record's exception and where it was raised."""
    if not record.exc_info or record.exc_info[0] is None:
        return {}
    frames = traceback.extract_tb(record.exc_info[2])
    at = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return {"error_type": record.exc_info[0].__name__, "at": at}
