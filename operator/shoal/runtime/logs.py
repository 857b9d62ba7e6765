"""Structured logs: JSON lines on stderr in a pod, coloured text on a terminal. No prompts, answers or keys, ever."""

import logging
import sys

import structlog


def configure(level: str = "info") -> None:
    """Sets up structlog for the process. `level` is debug, info, warning or error."""
    number = getattr(logging, level.upper())
    logging.basicConfig(level=number, stream=sys.stderr, format="%(message)s")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
