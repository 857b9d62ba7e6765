"""Fixtures that several folders share."""

import gc
from collections.abc import Generator
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.support.apiserver import apiserver
from tests.support.postgres import postgres_server

__all__ = ["apiserver", "postgres_server"]

# An example that took 0.2 s would fail its test, and so would examples that take long to draw: on a busy machine any of
# them may.
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_collection_finish() -> None:
    """Modules and collected tests, most of a worker's objects, live until its end. The collector would look at each of
    them in the midst of tests, for seconds where other processes need the cores."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(autouse=True, scope="session")
def _loggers_stay_loose() -> Generator[None]:
    """A process binds its loggers once and for all. Here one test that runs a command would bind them, to a stream that
    is gone by the next, and whoever reads a log after it would find nothing."""
    configure = structlog.configure

    def loose(*args: Any, **options: Any) -> None:
        configure(*args, **(options | {"cache_logger_on_first_use": False}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structlog, "configure", loose)
        yield


@pytest.fixture(autouse=True)
def _logs_as_ever() -> Generator[None]:
    """What a test configures ends with it."""
    yield
    structlog.reset_defaults()
