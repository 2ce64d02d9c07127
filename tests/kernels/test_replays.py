"""Replays are timed one by one, behind one that is not; on a GPU of our own making."""

from __future__ import annotations

import torch

from mstar.kernels.replays import replay_us


class Graph:
    def __init__(self, takes_ms):
        self.takes_ms, self.now_ms = list(takes_ms), 0.0

    def replay(self):
        self.now_ms += self.takes_ms.pop(0)


def test_every_replay_but_the_first_has_its_time(monkeypatch):
    graph = Graph([50.0, 1.0, 2.0, 4.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = graph.now_ms

        def elapsed_time(self, later):
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert replay_us(graph, 3) == [1000.0, 2000.0, 4000.0]
    assert graph.takes_ms == []
