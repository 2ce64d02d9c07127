"""The daemon of a test file: real ranks, one process for all its tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.live_daemon import LiveDaemon, live_daemon


@pytest.fixture(scope="module")
def live() -> Iterator[LiveDaemon]:
    """A daemon without a model; each load names its tp."""
    with live_daemon() as daemon:
        yield daemon
