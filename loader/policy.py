"""What a load's `spec` request becomes, decided once and before any process is started. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mstar.loader.errors import LoadError


class SpecRequest(Protocol):
    """The `spec` map of a `load` request, checked by the protocol's types."""

    @property
    def mtp(self) -> str: ...  # "off", "on" or "auto"
    @property
    def mtp_k(self) -> int: ...
    @property
    def draft_head(self) -> str: ...  # "auto", "bf16" or "fp8"
    @property
    def ngram(self) -> str: ...  # "off" or "on", like the two below
    @property
    def dflash(self) -> str: ...
    @property
    def dspark(self) -> str: ...


@dataclass(frozen=True, slots=True)
class SpecPolicy:
    """How a load speculates, as `loaded.spec` reports it."""

    mtp: bool
    k: int  # drafts a step; 0 without speculation
    draft_head: str | None  # dtype of the draft head; None without speculation
    reason: str | None  # why it does not speculate; None when it does


def decide(request: SpecRequest, has_head: bool, tp: int) -> SpecPolicy:
    """The policy of one load.

    has_head: whether the checkpoint brings an MTP head (headers.has_head). Raises LoadError `unsupported`,
    naming the field, for what was asked for by name and cannot be given; `auto` is served without, and
    `reason` says why.
    """
    for name in ("ngram", "dflash", "dspark"):
        if getattr(request, name) != "off":
            where = "on one rank" if tp == 1 else f"on {tp} ranks"
            message = f"{name} drafting is not built {where}; leave spec.{name} off"
            raise LoadError("unsupported", message, f"spec.{name}")
    if request.draft_head == "fp8":
        message = "an fp8 draft head is not built; leave spec.draft_head at auto"
        raise LoadError("unsupported", message, "spec.draft_head")
    if request.mtp == "off":
        return SpecPolicy(mtp=False, k=0, draft_head=None, reason="switched off by spec.mtp")
    reason = "speculative decoding is not built yet" if has_head else "the checkpoint has no MTP head"
    if request.mtp == "on":
        raise LoadError("unsupported", f"{reason}; load with spec.mtp auto or off", "spec.mtp")
    return SpecPolicy(mtp=False, k=0, draft_head=None, reason=reason)
