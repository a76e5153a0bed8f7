"""pytest's own log handlers at rest: what they would keep of a measured stretch is not the code under test's.

For `caplog` and its report pytest keeps each log record of a test, with what it holds, until the test ends. Counted,
that looks like a leak of any code that logs. Handlers that keep nothing (log files, the live log) and all that are not
pytest's stay in force, so a handler of the code under test that keeps records is still found.
Imports nothing of pytest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def log_capture_resting() -> Iterator[None]:
    """pytest keeps no log record meanwhile; afterwards its handlers are as they were. Elsewhere it changes nothing."""

    def refuse(record: logging.LogRecord) -> bool:  # one of its own each time: stretches may lie in each other
        return False

    with ExitStack() as stack:
        for handler in _keepers():
            handler.addFilter(refuse)
            stack.callback(handler.removeFilter, refuse)
        yield


def _keepers() -> list[logging.Handler]:
    """pytest's handlers that keep records: at the root, and at loggers that do not propagate there."""
    loggers = [logging.root, *logging.root.manager.loggerDict.copy().values()]
    handlers = {
        id(handler): handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers
    }
    return [handler for handler in handlers.values() if _is_pytests(handler) and hasattr(handler, "records")]


def _is_pytests(handler: logging.Handler) -> bool:
    return type(handler).__module__.startswith("_pytest.")
