"""What the cells of a check run under."""

from __future__ import annotations

from mstar.daemon.settings import load_settings
from mstar.scripts.arms import PLAIN, Arm
from mstar.scripts.check_cells import cell_flags


def test_a_cell_that_drafts_is_held_to_its_k() -> None:
    """A policy that lowers k would leave a check with nothing checked."""
    assert "--mtp-fixed" in cell_flags((Arm(8), 2), "fp32", [])
    assert "--mtp-fixed" not in cell_flags((PLAIN, 2), "fp32", [])
    assert load_settings({"mtp_fixed": True}).mtp_fixed
    assert not load_settings({}).mtp_fixed
