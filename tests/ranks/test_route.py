"""Who speculates in a step, how far, and why not: the one decision as a table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.ranks.speculation.route import LoadFacts, Reason, RequestFacts, Route, route

LOAD = LoadFacts(k=3, in_force=3)
# 50 tokens, 40 to come, all drafts of the last step there
DECODING = RequestFacts(spec_k=None, given_up=False, length=50, end=90, drafts=3)
PREFILL = replace(DECODING, drafts=0)


@pytest.mark.parametrize(
    ("request_", "load", "wanted"),
    [
        (DECODING, LOAD, Route(True, 3, 3, Reason.SPECULATES)),
        (PREFILL, LOAD, Route(True, 0, 3, Reason.SPECULATES)),
        (DECODING, LoadFacts(0, 0), Route(False, 0, 0, Reason.LOAD_OFF)),
        (replace(DECODING, spec_k=0), LOAD, Route(False, 0, 0, Reason.REQUEST_OFF)),
        (replace(DECODING, spec_k=2), LOAD, Route(True, 2, 2, Reason.SPECULATES)),
        (replace(DECODING, spec_k=8), LOAD, Route(True, 3, 3, Reason.SPECULATES)),
        (replace(DECODING, given_up=True), LOAD, Route(False, 0, 0, Reason.GIVEN_UP)),
        # the policy lowers k: drafts that are there and no longer wanted are not checked
        (DECODING, LoadFacts(3, 1), Route(True, 1, 1, Reason.SPECULATES)),
        (DECODING, LoadFacts(3, 0), Route(True, 0, 0, Reason.LOWERED)),
        # few drafts were made
        (replace(DECODING, drafts=1), LOAD, Route(True, 1, 3, Reason.SPECULATES)),
        # room: of a sequence's end or of its blocks
        (replace(DECODING, length=86), LOAD, Route(True, 3, 3, Reason.SPECULATES)),
        (replace(DECODING, length=87), LOAD, Route(True, 3, 2, Reason.SPECULATES)),
        (replace(DECODING, length=88), LOAD, Route(True, 2, 1, Reason.SPECULATES)),
        (replace(DECODING, length=89), LOAD, Route(True, 1, 0, Reason.SPECULATES)),
        (replace(DECODING, length=90), LOAD, Route(True, 0, 0, Reason.NO_ROOM)),
        (replace(PREFILL, length=89), LOAD, Route(True, 0, 0, Reason.NO_ROOM)),
        # the blocks end before the sequence does
        (replace(DECODING, length=95), LOAD, Route(True, 0, 0, Reason.NO_ROOM)),
        # the reasons that hold for good come first
        (replace(DECODING, spec_k=0, given_up=True), LoadFacts(3, 0), Route(False, 0, 0, Reason.REQUEST_OFF)),
        (replace(DECODING, given_up=True), LoadFacts(3, 0), Route(False, 0, 0, Reason.GIVEN_UP)),
    ],
)
def test_table(request_: RequestFacts, load: LoadFacts, wanted: Route) -> None:
    assert route(request_, load) == wanted


@given(
    spec_k=st.none() | st.integers(0, 8),
    given_up=st.booleans(),
    length=st.integers(1, 60),
    end=st.integers(1, 60),
    drafts=st.integers(0, 8),
    k=st.integers(0, 8),
    lowered=st.integers(0, 8),
)
def test_drafts_stay_within_every_bound_and_only_followed_requests_have_any(
    spec_k: int | None, given_up: bool, length: int, end: int, drafts: int, k: int, lowered: int
) -> None:
    load = LoadFacts(k, min(k, lowered))
    way = route(RequestFacts(spec_k, given_up, length, end, drafts), load)
    assert 0 <= way.check <= min(drafts, load.in_force) and 0 <= way.draft <= load.in_force
    assert way.check <= max(0, end - length)
    if spec_k is not None:
        assert max(way.check, way.draft) <= spec_k
    if way.check or way.draft:
        assert way.follow and way.reason is Reason.SPECULATES
    assert way.follow == (k > 0 and spec_k != 0 and not given_up)
