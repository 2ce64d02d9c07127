"""What speculation did for one request, summed from the engine's runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from mstar.daemon.events import LoadedSpec, SpecReport
from mstar.daemon.requests import SpecRequest
from mstar.ranks.messages import TokenRun


@dataclass(slots=True)
class SpecCounts:
    """Counts of one request.

    k: the most drafts a step that it may have; at 0 it decodes plainly, and every figure stays that of plain
    decode. by depth: the first draft of a step comes first.
    """

    k: int = 0
    steps: int = 0
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: SpecRequest, loaded: LoadedSpec) -> SpecCounts:
        """For a request under a load; `request.mtp_k` is at most the load's."""
        k = 0 if request.mtp == "off" else min(loaded.k, request.mtp_k or loaded.k)
        return cls(k, 0, [0] * k, [0] * k)

    def take(self, run: TokenRun, kept: int) -> None:
        """Counts a run of which the first `kept` ids went into the answer; drafts after these are not accepted."""
        if run.drafted is None or not self.k:
            return
        self.steps += 1
        for depth in range(run.drafted):
            self.drafted_by_depth[depth] += 1
        for depth in range(min(run.accepted, kept)):
            self.accepted_by_depth[depth] += 1

    @property
    def drafted(self) -> int:
        return sum(self.drafted_by_depth)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_by_depth)

    def report(self) -> SpecReport:
        tau = mean_accepted(self.accepted, self.steps)
        return SpecReport(
            mtp=self.k > 0,
            k=self.k,
            steps=self.steps,
            drafted=self.drafted,
            accepted=self.accepted,
            tau=tau,
            tokens_per_step=round(tau + 1, 4),
            drafted_by_depth=list(self.drafted_by_depth),
            accepted_by_depth=list(self.accepted_by_depth),
        )


def mean_accepted(accepted: int, steps: int) -> float:
    """tau: accepted drafts a verify step, the bonus not counted."""
    return round(accepted / steps, 4) if steps else 0.0
