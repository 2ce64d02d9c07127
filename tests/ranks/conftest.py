"""What tests of the ranks share."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[1, 2], ids=["one rank", "mesh"])
def ranks(request: pytest.FixtureRequest) -> int:
    """Over how many ranks a bench's trunk lies: `SlotBackend` or `MeshBackend`."""
    count: int = request.param
    return count
