"""How many drafts a step are worth it now."""

from __future__ import annotations


class Policy:
    """k: the most, as the load was made for."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.in_force = k

    def plan(self, sequences: int) -> int:
        """Drafts in force for a step of so many decoding sequences."""
        return self.in_force

    def count(self, drafted: int, accepted: int) -> None:
        """Learns what became of one request's drafts."""

    def gives_up(self, drafted: int, accepted: int) -> bool:
        """Whether a request with these totals should decode plainly from now on."""
        return False
