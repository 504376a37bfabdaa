"""Rate limits for log lines: clients can cause a thousand a second."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

LOGGERS = ("hotset.server", "hotset.grammar", "uvicorn.error", "asyncio")
N_LINES, SECONDS = 20, 10.0  # at most N_LINES of one logger in SECONDS; the next one counts the omitted lines

log = logging.getLogger("hotset.server")

MOST_NOTICES = 1000  # lines that one server remembers


class Notices:
    """Log lines that a server writes once, however often requests cause them."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, line: str) -> None:
        """Log a line that was not logged before. After MOST_NOTICES different lines it logs no more."""
        if line not in self._logged and len(self._logged) < MOST_NOTICES:
            self._logged.add(line)
            log.warning("%s", line)


class RateLimit(logging.Filter):
    """A filter that passes `N_LINES` records in every `SECONDS`, and counts the others."""

    def __init__(self) -> None:
        super().__init__()
        self._since, self._n = 0.0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self._since >= SECONDS:
            if self._n > N_LINES:
                record.msg = f"{record.getMessage()} ({self._n - N_LINES} earlier lines were left out)"
                record.args = ()
            self._since, self._n = now, 0
        self._n += 1
        return self._n <= N_LINES


def bound_logs() -> None:
    """Limit the rate of the server's loggers. A second call changes nothing."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, RateLimit) for one in logger.filters):
            logger.addFilter(RateLimit())


def log_loop_errors(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an event loop's error, without a traceback for an OSError, such as a lack of descriptors."""
    error = context.get("exception")
    if isinstance(error, OSError):
        log.warning("%s: %s", context.get("message"), error)
    else:
        loop.default_exception_handler(context)
