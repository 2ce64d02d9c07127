"""What a load's `spec` request becomes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from mstar.loader.errors import LoadError
from mstar.loader.policy import decide


@dataclass(frozen=True)
class Request:
    mtp: str = "auto"
    mtp_k: int = 3
    draft_head: str = "auto"
    ngram: str = "off"
    dflash: str = "off"
    dspark: str = "off"


@pytest.mark.parametrize("mtp", ["auto", "off"])
@pytest.mark.parametrize("has_head", [True, False])
def test_without_being_asked_for_a_load_serves_without_speculation_and_says_why(mtp, has_head):
    policy = decide(Request(mtp=mtp), has_head, 1)
    assert (policy.mtp, policy.k, policy.draft_head) == (False, 0, None)
    assert policy.reason


def test_reasons_tell_a_missing_head_from_a_switch():
    reasons = {
        decide(Request(mtp="off"), True, 1).reason,
        decide(Request(), True, 1).reason,
        decide(Request(), False, 1).reason,
    }
    assert len(reasons) == 3


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mtp": "on"}, "spec.mtp"),
        ({"draft_head": "fp8"}, "spec.draft_head"),
        ({"ngram": "on"}, "spec.ngram"),
        ({"dflash": "on"}, "spec.dflash"),
        ({"dspark": "on"}, "spec.dspark"),
    ],
)
@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("tp", [1, 4])
def test_what_is_not_built_is_refused_by_name(fields, named, has_head, tp):
    with pytest.raises(LoadError) as caught:
        decide(replace(Request(), **fields), has_head, tp)
    assert (caught.value.error_class, caught.value.field) == ("unsupported", named)
