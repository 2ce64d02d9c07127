"""Arms of a comparison: plain decode, and speculation with k drafts a step."""

from __future__ import annotations

from dataclasses import dataclass

MOST_DRAFTS = 8


class ArmError(ValueError):
    """Not the name of an arm; the message lists what is."""


@dataclass(frozen=True, slots=True)
class Arm:
    """drafts: a step's; 0 is plain decode."""

    drafts: int

    @property
    def name(self) -> str:
        return f"mtp{self.drafts}" if self.drafts else "plain"

    @property
    def daemon_flags(self) -> list[str]:
        """What a daemon is started with."""
        return ["--mtp", "on", "--mtp-k", str(self.drafts)] if self.drafts else ["--mtp", "off"]


PLAIN = Arm(0)


def parse_arms(text: str) -> list[Arm]:
    """`plain,mtp1,mtp3` as arms, in that order. Raises ArmError."""
    arms = []
    for name in text.split(","):
        digits = name.removeprefix("mtp")
        if name != "plain" and not (
            name.startswith("mtp") and digits.isdecimal() and 1 <= int(digits) <= MOST_DRAFTS
        ):
            raise ArmError(f"{name!r} is no arm: give plain or mtp1 to mtp{MOST_DRAFTS}, as in plain,mtp3")
        arms.append(PLAIN if name == "plain" else Arm(int(digits)))
    if len(set(arms)) < len(arms):
        raise ArmError(f"{text!r} names an arm twice")
    return arms
