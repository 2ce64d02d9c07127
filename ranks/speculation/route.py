"""Which requests speculate in a step, how far, and why not: decided here once, for every rank and both backends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """Why a request's step is what it is."""

    SPECULATES = "speculates"
    LOAD_OFF = "the load has no head"
    REQUEST_OFF = "the request asked for plain decode"
    GIVEN_UP = "plain decode was faster for it"
    LOWERED = "plain decode is faster for a batch of this size"
    NO_ROOM = "no room for a draft before its end or in its blocks"


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """One request before a step. Lengths are in tokens of prompt and output."""

    spec_k: int | None  # None: the load's
    given_up: bool
    length: int  # known tokens, the newest one's KV not there yet; of a prefill, those known at its end
    end: int  # the length that drafts must not pass: of its last token but one, and of its blocks
    drafts: int  # made by its last step


@dataclass(frozen=True, slots=True)
class LoadFacts:
    """What is the same for all requests of a step."""

    k: int  # drafts a step that the load was made for; 0: no head
    in_force: int  # of these, as many as the policy takes now


@dataclass(frozen=True, slots=True)
class Route:
    """follow: the head runs over all the request's rows, so that its KV has no holes, drafts or not."""

    follow: bool
    check: int  # drafts of the last step that this one checks
    draft: int  # the most to make for the next one
    reason: Reason


def route(request: RequestFacts, load: LoadFacts) -> Route:
    """The one decision. Once a request is not followed it never speculates again (its head's KV has a hole)."""
    if load.k == 0:
        return Route(False, 0, 0, Reason.LOAD_OFF)
    if request.spec_k == 0:
        return Route(False, 0, 0, Reason.REQUEST_OFF)
    if request.given_up:
        return Route(False, 0, 0, Reason.GIVEN_UP)
    most = min(load.in_force, load.k if request.spec_k is None else request.spec_k)
    if most == 0:
        return Route(True, 0, 0, Reason.LOWERED)
    room = max(0, request.end - request.length)
    check = min(request.drafts, most, room)
    # this step gives one token at least
    draft = min(most, max(0, room - 1))
    return Route(True, check, draft, Reason.SPECULATES if check or draft else Reason.NO_ROOM)
