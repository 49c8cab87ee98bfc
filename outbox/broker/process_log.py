"""A child process of a worker logs to the log of the worker, with time, level and pid."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import Final

from outbox.utils.log_context import MessageFilter, suffix
from outbox.utils.safe_text import for_people, shown_text

LOG_FILE_VARIABLE: Final = "OUTBOX_LOG_FILE"
LOG_LEVEL_VARIABLE: Final = "OUTBOX_LOG_LEVEL"
_PLAIN: Final = logging.Formatter()


class _Formatter(logging.Formatter):
    """Removes passwords and control characters from a line, and adds the id of the handled message."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return super().formatMessage(record) + suffix(record)

    def format(self, record: logging.LogRecord) -> str:
        return for_people(super().format(record))


def _escape(handler: logging.Handler, record: logging.LogRecord) -> bool:
    """Escape what outbox says about texts of other programs. The template stays, because tools group records by it."""
    if record.name.partition(".")[0] != "outbox":
        return True
    if isinstance(record.args, tuple):
        record.args = tuple(map(_escaped, record.args))
    plain = handler.formatter or _PLAIN
    # A formatter of the project may write errors in its own form, such as JSON.
    if record.exc_info and type(plain).formatException is logging.Formatter.formatException:
        record.exc_text = for_people(record.exc_text or plain.formatException(record.exc_info))
    return True


def _escaped(value: object) -> object:
    if isinstance(value, BaseException):
        return for_people(shown_text(value))
    return for_people(value) if type(value) is str else value


def told_to_children(*, level: int, file: str | None) -> Mapping[str, str]:
    """Return the environment that makes child processes log to `file` at `level`; without a file, to standard error."""
    return {LOG_LEVEL_VARIABLE: str(level), **({LOG_FILE_VARIABLE: file} if file else {})}


def always(logger: logging.Logger, text: str) -> None:
    """Log a line at INFO even if the logger passes only warnings, the default in Celery's worker."""
    if logger.disabled:
        return
    logger.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, text, (), None))


def write_log(process_name: str) -> None:
    """Log to the worker's file, or to standard error if the project has configured no logging.

    Each line is one write at the end of the file, so that processes can share the file. In the log of a project, the
    errors that outbox reports have no control characters either.
    """
    file, root = os.environ.get(LOG_FILE_VARIABLE), logging.getLogger()
    for configured in root.handlers:
        configured.addFilter(partial(_escape, configured))
    if root.handlers and not file:
        return
    handler = logging.FileHandler(file, encoding="utf-8") if file else logging.StreamHandler()
    handler.addFilter(MessageFilter())
    handler.setFormatter(
        _Formatter(f"[%(asctime)s: %(levelname)s/outbox-{process_name}:%(process)d] %(name)s: %(message)s")
    )
    if not root.handlers:
        root.setLevel(int(os.environ.get(LOG_LEVEL_VARIABLE) or logging.INFO))
    root.addHandler(handler)
