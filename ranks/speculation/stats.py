"""Counts of what speculation did since load, as `stats` reports them."""

from __future__ import annotations


class SpecStats:
    """Totals over requests, by depth: place 0 is the first draft of a step."""

    def __init__(self, k: int) -> None:
        self.steps = 0  # decode steps of requests that the head follows, those without drafts too
        self.drafted = [0] * k
        self.accepted = [0] * k

    def count(self, drafted: int, accepted: int) -> None:
        """Adds one request's step: drafts checked, and those of them that were accepted and kept."""
        self.steps += 1
        for depth in range(drafted):
            self.drafted[depth] += 1
        for depth in range(accepted):
            self.accepted[depth] += 1
