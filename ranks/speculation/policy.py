"""How many drafts a step are worth it now: what they gain by the acceptance seen, against what they cost.

A step that checks drafts costs more than a plain one: little where a step waits for weights (few rows), as much as
the rows themselves where it computes (many). So costs are measured at load, for batches of several sizes, and
acceptance is learnt from what runs. It moves speed alone: tokens are plain decode's under any policy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Before anything is seen: a draft is accepted so often after an accepted one, with the weight of so many steps.
PRIOR_RATE, PRIOR_STEPS = 0.9, 12.0
# Depths that are not drafted now drift at this weight a step to what the depth before them makes likely, so that a
# load which lowered k on a bad stretch raises it again.
UNSEEN = 0.5
# Steps are forgotten at this rate: the last 400 or so count.
DECAY = 0.9975
# The load's k stays in force until another one is this much faster: estimates are a few per cent off.
WORTH_A_CHANGE = 1.15
# A load that stopped tries again only where it looks this much faster than plain decode.
WORTH_A_RETURN = 1.05
# A request gives up where speculation is slower than this beside plain decode: a few steps say no more.
CLEARLY_SLOWER = 0.95
# Of requests that came while plain decode looked faster, so many decode plainly before the next try.
PLAIN_REQUESTS = 12
REVIEW_STEPS = 16  # between two looks at the load's acceptance
LONG_REQUEST = 256  # tokens: the 32 steps after which a request may give up are an eighth of it


@dataclass(frozen=True, slots=True)
class Costs:
    """What a step costs, in plain ones: measured[sequences][k] for batches and drafts that were tried.

    At k = 0 the head still follows. In between it is interpolated; a larger batch is taken for the largest measured.
    """

    measured: Mapping[int, Mapping[int, float]] = field(default_factory=dict)

    def of(self, k: int, sequences: int) -> float:
        """Of a step that checks k drafts of each of so many sequences, and makes as many."""
        sizes = sorted(self.measured)
        if not sizes:
            return 1.0
        return _between(sizes, [self._of(k, size) for size in sizes], sequences)

    def _of(self, k: int, size: int) -> float:
        steps = self.measured[size]
        ks = sorted(steps)
        return _between(ks, [steps[tried] for tried in ks], k)


class Policy:
    """The drafts in force over the requests of a load.

    k: the most, as the load was made for. costs: without any measured, k stays in force.
    """

    def __init__(self, k: int, costs: Costs | None = None) -> None:
        self.k = k
        self.in_force = k
        self._costs = costs or Costs()
        self._steps = self._reached = self._prior()
        self._forget()
        self._next_review = 0
        self._sequences = 0
        self._calls = 0
        self._plain_requests = 0

    def plan(self, sequences: int) -> int:
        """Drafts in force for a step of so many decoding sequences."""
        self._calls += 1
        if sequences and (sequences != self._sequences or self._calls >= self._next_review):
            self._sequences = sequences
            self._next_review = self._calls + REVIEW_STEPS
            self.in_force = self._best(sequences)
        return self.in_force

    def starts(self, sequences: int = 1, tokens: int = LONG_REQUEST) -> bool:
        """Whether a new request speculates: not while plain decode is faster for a request alone, but for a try.

        sequences: that run, with it; tokens: the most that it gets. That a large batch decodes plainly is no reason
        for a long request: the batch may shrink, and who does not start stays plain. A short one would follow for
        nothing until it gives up, which is much of its life.
        """
        if not self.k:
            return True
        if self._best(1):
            return tokens >= LONG_REQUEST or self._best(sequences) > 0
        self._plain_requests += 1
        if self._plain_requests <= PLAIN_REQUESTS:
            return False
        self._forget()
        self._next_review = 0
        return True

    def count(self, drafted: int, accepted: int) -> None:
        """Learns from one request's step."""
        steps, reached = self._steps, self._reached
        for depth in range(self.k if drafted else 0):
            steps[depth] *= DECAY
            reached[depth] *= DECAY
            if depth < drafted:
                steps[depth] += 1
                reached[depth] += accepted > depth
            else:
                steps[depth] += UNSEEN
                reached[depth] += UNSEEN * PRIOR_RATE * reached[depth - 1] / steps[depth - 1]

    def gives_up(self, steps: int, drafted: int, accepted: int) -> bool:
        """Whether a request whose last steps came to these totals should decode plainly from now on."""
        if not self._costs.measured:
            return False
        cost = self._costs.of(round(drafted / steps), max(1, self._sequences))
        return 1 + accepted / steps < CLEARLY_SLOWER * cost

    def _best(self, sequences: int) -> int:
        if not self._costs.measured or not self.k:
            return self.k
        speeds = [1.0]  # over plain decode, by drafts
        gain = 1.0
        for k in range(1, self.k + 1):
            gain += self._reached[k - 1] / self._steps[k - 1]
            speeds.append(gain / self._costs.of(k, sequences))
        best = max(range(1, self.k + 1), key=speeds.__getitem__)
        if speeds[best] < (1.0 if self.in_force else WORTH_A_RETURN):
            return 0
        steady = self.in_force or self.k
        for k in (self.k, steady):
            if speeds[k] >= 1.0 and speeds[best] < speeds[k] * WORTH_A_CHANGE:
                return k
        return best

    def _forget(self) -> None:
        self._steps, self._reached = [PRIOR_STEPS] * self.k, self._prior()
        self._plain_requests = 0

    def _prior(self) -> list[float]:
        return [PRIOR_STEPS * PRIOR_RATE ** (depth + 1) for depth in range(self.k)]


def _between(at: Sequence[int], values: Sequence[float], x: int) -> float:
    """Piecewise linear through (at, values), level outside."""
    right = bisect_left(at, x)
    if right == 0:
        return values[0]
    if right == len(at):
        return values[-1]
    left = right - 1
    share = (x - at[left]) / (at[right] - at[left])
    return values[left] + share * (values[right] - values[left])
