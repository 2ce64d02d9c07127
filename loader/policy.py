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


def check_built(request: SpecRequest) -> None:
    """Refuses by name what the request asks for and no load can give, before the model is even looked for.

    Raises LoadError `unsupported`, naming the field.
    """
    for name in ("ngram", "dflash", "dspark"):
        if getattr(request, name) != "off":
            message = f"{name} drafting is not built yet; leave spec.{name} off"
            raise LoadError("unsupported", message, f"spec.{name}")
    if request.draft_head == "fp8":
        message = "an fp8 draft head is not built; leave spec.draft_head at auto"
        raise LoadError("unsupported", message, "spec.draft_head")


def decide(request: SpecRequest, head_fault: LoadError | None, tp: int, dtype: str) -> SpecPolicy:
    """The policy of one load, the same for one rank and for a mesh.

    head_fault: why the checkpoint's MTP head cannot be used, None when it can (manifest.head_fault). dtype: of
    the load, "bf16", "fp16" or "fp32", in which the head runs. Raises LoadError, naming the field, for what was
    asked for by name and cannot be given; `auto` is served without, and `reason` says why.
    """
    check_built(request)
    if request.mtp == "off":
        return SpecPolicy(mtp=False, k=0, draft_head=None, reason="switched off by spec.mtp")
    if head_fault is not None and request.mtp == "on":
        message = f"{head_fault.message}; load with spec.mtp auto or off"
        raise LoadError(head_fault.error_class, message, head_fault.field)
    if head_fault is not None:
        return SpecPolicy(mtp=False, k=0, draft_head=None, reason=head_fault.message)
    if request.draft_head not in ("auto", dtype):
        message = f"the draft head runs in the load's dtype ({dtype}); leave spec.draft_head at auto"
        raise LoadError("unsupported", message, "spec.draft_head")
    return SpecPolicy(mtp=True, k=request.mtp_k, draft_head=dtype, reason=None)
