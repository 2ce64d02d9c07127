"""Checks and times candidates on a GPU, as a decode step runs them: from a captured graph.

One graph holds many calls, each with a weight of its own, so that no cache serves them: a replay reads at least
ROTATED_BYTES (256 MiB, over four times the 60 MB of an H200's L2) of different weights before it comes back to the
first, or the weight itself is larger (the head's). Calls follow each other as kernels of a step do, launches of
dependents included; a call's time is the replay's over the number of calls.
"""

from __future__ import annotations

import gc
from statistics import median

import torch

from mstar.kernels.bench.compile import CompilePool, fatal
from mstar.kernels.bench.parity import (
    Mismatch,
    RunLinear,
    check,
    make_inputs,
    make_weight,
    reference,
    same_bytes,
)
from mstar.kernels.bench.tune import DeviceLost, Pass
from mstar.kernels.registry import GemmKey, KernelChoice
from mstar.kernels.replays import replay_us

ROTATED_BYTES = 256 << 20
# A replay reads about this much, 0.25 ms and more, beside which its start (a few us) is small.
REPLAY_BYTES = 1 << 30
LEAST_CALLS, MOST_CALLS = 4, 256
REPLAYS = 9  # of a pass; its time is their median


class GpuRig:
    """`tune.Rig` on one GPU. Weights and inputs are those of the size at hand, until `release`."""

    def __init__(self, device: torch.device, run_linear: RunLinear, workers: int = 0, seed: int = 0):
        """workers: processes that compile; 0 compiles where it measures, one after another."""
        self.device = device
        self.run_linear = run_linear
        self.pool = CompilePool(workers) if workers else None
        self.seed = seed
        self.size: _Size | None = None
        self.stream = torch.cuda.Stream(device)

    def compile(self, jobs: list[tuple[GemmKey, KernelChoice]], seconds: float) -> None:
        """Compiles into Triton's cache, many at once; what fails there is not tried again."""
        if self.pool is not None:
            self.pool.compile([job for job in jobs if not job[1].kernel.startswith("cublas")], seconds)

    def prepare(self, key: GemmKey, choice: KernelChoice) -> Pass:
        """Raises Mismatch, what the kernel raises, or DeviceLost."""
        if self.pool is not None and (key, choice) in self.pool.failures:
            raise RuntimeError(self.pool.failures[key, choice])
        if self.size is None or self.size.key != key:
            self.release()
            self.size = _Size(key, self.device, self.seed)
        try:
            return self._capture(self.size, choice)
        except Exception as error:
            if fatal(error):
                raise DeviceLost(f"{key.name} {choice.name}: {error}") from error
            raise

    def release(self) -> None:
        """Frees weights, inputs and what graphs held."""
        self.size = None
        gc.collect()
        torch.cuda.empty_cache()

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()

    def _capture(self, size: _Size, choice: KernelChoice) -> Pass:
        inputs, weights, key = size.inputs, size.weights, size.key
        size.draw(first=True)
        check(key, inputs.run(self.run_linear, choice, weights[0]), size.expected, "eager")
        graph, outs = torch.cuda.CUDAGraph(), []
        torch.cuda.synchronize()
        # not torch.cuda.graph: it empties the allocator's cache each time, and there are over a thousand captures
        with torch.cuda.stream(self.stream):
            graph.capture_begin()
            try:
                for call in range(size.calls):
                    outs.append(inputs.run(self.run_linear, choice, weights[call % len(weights)]))
            finally:
                graph.capture_end()
        # other inputs than those of the capture, and nothing of the last run left to pass for a result
        size.draw(first=False)
        eager = inputs.run(self.run_linear, choice, weights[0])
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        check(key, outs[0], size.expected, "replay")
        if not same_bytes(outs, eager):
            raise Mismatch("replay: other bytes than eager")
        return lambda: median(replay_us(graph, REPLAYS)) / len(outs)


class _Size:
    """What all candidates of one size share: weights side by side, all alike, and two draws of inputs."""

    def __init__(self, key: GemmKey, device: torch.device, seed: int):
        self.key = key
        generator = torch.Generator(device).manual_seed(seed)
        weight = make_weight(key, device, generator)
        copies = max(1, -(-ROTATED_BYTES // weight.nbytes))
        self.calls = min(MOST_CALLS, max(copies, LEAST_CALLS, REPLAY_BYTES // weight.nbytes))
        self.weights = weight.repeat(min(copies, self.calls), 1, 1)
        self.inputs = make_inputs(key, device, generator)
        self.draws: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        for _ in range(2):
            for rows in self.inputs.rows():
                rows.normal_(generator=generator)
            kept = [rows.clone() for rows in self.inputs.rows()]
            self.draws.append((kept, reference(self.inputs, weight)))
        self.expected = self.draws[0][1]

    def draw(self, *, first: bool) -> None:
        """Puts one of the two draws where candidates and captured graphs read."""
        kept, self.expected = self.draws[0 if first else 1]
        for rows, values in zip(self.inputs.rows(), kept, strict=True):
            rows.copy_(values)
