"""How long replays of a captured graph take."""

from __future__ import annotations

import torch


def replay_us(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    """Microseconds of each of `replays` replays by events on the current stream, behind one that is not timed."""
    graph.replay()
    times = []
    for _ in range(replays):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        graph.replay()
        ended.record()
        times.append((begun, ended))
    torch.cuda.synchronize()
    return [1e3 * float(begun.elapsed_time(ended)) for begun, ended in times]
