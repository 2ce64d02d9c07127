"""Arms of a comparison: plain decode, speculation with k drafts a step, and a load with it whose requests decline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MOST_DRAFTS = 8


class ArmError(ValueError):
    """Not the name of an arm; the message lists what is."""


@dataclass(frozen=True, slots=True)
class Arm:
    """drafts: a step's; 0 is plain decode. declined: the load speculates, the requests ask not to."""

    drafts: int
    declined: bool = False

    @property
    def name(self) -> str:
        kind = "off" if self.declined else "mtp"
        return f"{kind}{self.drafts}" if self.drafts else "plain"

    @property
    def daemon_flags(self) -> list[str]:
        """What a daemon is started with."""
        return ["--mtp", "on", "--mtp-k", str(self.drafts)] if self.drafts else ["--mtp", "off"]

    @property
    def request_fields(self) -> dict[str, Any]:
        """What each request says."""
        return {"spec": {"mtp": "off"}} if self.declined else {}


PLAIN = Arm(0)


def parse_arms(text: str) -> list[Arm]:
    """`plain,mtp1,off3` as arms, in that order. Raises ArmError."""
    arms = [_parse_arm(name) for name in text.split(",")]
    if len(set(arms)) < len(arms):
        raise ArmError(f"{text!r} names an arm twice")
    return arms


def _parse_arm(name: str) -> Arm:
    kind, digits = name[:3], name[3:]
    if name == PLAIN.name:
        return PLAIN
    if kind in ("mtp", "off") and digits in map(str, range(1, MOST_DRAFTS + 1)):
        return Arm(int(digits), declined=kind == "off")
    raise ArmError(
        f"{name!r} is no arm: give plain, mtp1 to mtp{MOST_DRAFTS}, or off1 to off{MOST_DRAFTS} "
        "(loaded with drafts, which the requests decline), as in plain,mtp3"
    )
