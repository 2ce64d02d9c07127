"""Steps of plain decode that never wait for the device: their rows, draws and registers stay on it.

A decode part runs as one captured graph of its bucket (or, with `eager`, as the same calls on the same shapes), a
small prefill part as one of its shape (`mstar.ranks.prefill_steps`). Draws are written to pinned memory of the host,
which reads them behind an event, so that it plans and launches step n + 1 while step n runs. What a step draws is what
`mstar.ranks.leader` would draw; requests that need more than a token's draw (penalties, logprobs, speculation) go
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from mstar.arch.caches import LayerCache
from mstar.kernels.compiling import compile_together
from mstar.kernels.ops import Ops
from mstar.kernels.staging import staged
from mstar.kernels.step import PAGES, StepRegisters
from mstar.ranks.executor import Executor
from mstar.ranks.plan import Drawn, StepPlan
from mstar.ranks.prefill_steps import PrefillSteps
from mstar.ranks.sampler import Sampler

# Steps, of which two neighbours are timed: an event with a time takes the device 3 us, any other none.
TIMED_EVERY = 16


class StepModel(Protocol):
    """What device steps run; mstar.arch.trunk.Trunk."""

    ops: Ops

    # begins with the operations' `begin_step`, which moves the registers' turn
    def step(
        self,
        slots: torch.Tensor,
        registers: StepRegisters,
        block_table: torch.Tensor,
        caches: list[LayerCache],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Events:
    """What is recorded of a step: its end, and in steps that are timed its begin, too."""

    arrived: torch.cuda.Event
    timed_begin: torch.cuda.Event
    timed_end: torch.cuda.Event

    @classmethod
    def make(cls) -> Events:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        return cls(torch.cuda.Event(), begin, end)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight.

    finals, decodes: [rows, 2] int64, where (token, finish code) of each draw arrive.
    """

    finals: torch.Tensor
    decodes: torch.Tensor
    arrived: torch.cuda.Event | None  # None: at once
    began: torch.cuda.Event | None = None  # of a decode part alone that is timed
    before: torch.cuda.Event | None = None  # with `began`: the end of a step that was under way at the launch

    @property
    def done(self) -> bool:
        return self.arrived is None or self.arrived.query()

    def wait(self) -> Drawn:
        """What it drew, once the device is there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        rows = self.finals.tolist() + self.decodes.tolist()
        return Drawn([[token] for token, _ in rows], [code for _, code in rows])

    def device_times(self) -> list[tuple[str, float]]:
        """Its time on the device, and what passed between it and the step before it."""
        if self.began is None or self.arrived is None:
            return []
        times = [("device", self.began.elapsed_time(self.arrived) / 1e3)]
        if self.before is not None:
            times.append(("gap", self.before.elapsed_time(self.began) / 1e3))
        return times


class DeviceSteps:
    """Runs steps of one rank's executor without waiting for them.

    buckets: the sizes that decode parts are padded to; the largest holds every sequence. prefills: whether small
    prefill parts are padded to shapes too.
    """

    def __init__(
        self,
        executor: Executor,
        sampler: Sampler,
        vocab_size: int,
        buckets: Sequence[int],
        eager: bool = False,
        prefills: bool = True,
    ) -> None:
        model = executor.model
        self._model: StepModel = model  # type: ignore[assignment]
        self._executor = executor
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._buckets = sorted(buckets)
        self._eager = eager or executor.device.type == "cpu"
        self._most = most = max(self._buckets)
        device = executor.device
        self._slots = torch.zeros(most, dtype=torch.int32, device=device)
        self._in_slots: list[int] = [0] * most  # what `_slots` holds
        draws = sampler.registers
        self._registers = StepRegisters(
            temperature=draws.temperature,
            seed=draws.seed,
            top_k=draws.top_k,
            top_p=draws.top_p,
            min_p=draws.min_p,
            left=draws.left,
            stop_ids=draws.stop_ids,
            ahead=executor.ahead,
            lengths=executor.lengths,
            pending=executor.pending if executor.drafts else None,
            turn=torch.zeros(1, dtype=torch.int64, device=device),
        )
        # finals are drawn by what decode parts draw with, so that a load has compiled it; their page the host says
        self._final_registers = [
            replace(self._registers, turn=torch.full((1,), page, dtype=torch.int64, device=device))
            for page in range(PAGES)
        ]
        # by launch, and by decode part, whose turn the device counts along
        self._finals, self._decodes = (self._pinned(PAGES, most, 2) for _ in range(2))
        self._launches = self._turn = 0
        self._events = None if device.type == "cpu" else [Events.make() for _ in range(PAGES)]
        self._latest: Launched | None = None
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        # references take prefill's borders from the host
        padded = prefills and self._model.ops.uniform
        self._prefills = PrefillSteps(executor, self._eager) if padded else None
        self.graph_bytes = 0

    def takes(self, plan: StepPlan) -> bool:
        """Whether this runs the plan; nobody of it may need more than a draw."""
        # a chunk that the head follows needs all of its rows' hiddens, final or not: a hole would be attended for ever
        follows = bool(plan.draft_most) or any(chunk.head for chunk in plan.chunks)
        slots = [chunk.slot for chunk in plan.chunks if chunk.final] + plan.decode_slots
        if follows or plan.decode_counts or len(slots) > self._most:
            return False
        return self._sampler.draws_on_device(slots)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Runs all of the plan's rows; returns at once."""
        began, before = self._begin(plan)
        self._sampler.registers.settle()
        page = self._launches % PAGES
        finals = self._finals[page, : self._prefill(plan, page)]
        count = len(plan.decode_slots)
        if count:
            self.place(plan.decode_slots, plan.decode_bucket)
            filtered = self._sampler.filtered(plan.decode_slots)
            self._decode(plan.decode_bucket, filtered)
            self._turn = (self._turn + 1) % PAGES
        decodes = self._decodes[self._turn, :count]
        self._latest = Launched(finals, decodes, self._end(), began, before)
        self._launches += 1
        return self._latest

    def _begin(self, plan: StepPlan) -> tuple[torch.cuda.Event | None, torch.cuda.Event | None]:
        """`began` and `before` of the step to be launched: of every second one that is timed."""
        if self._events is None or plan.chunks or self._launches % TIMED_EVERY != 1:
            return None, None
        began = self._events[self._launches % PAGES].timed_begin
        began.record(torch.cuda.current_stream(self._executor.device))
        latest = self._latest
        return began, latest.arrived if latest is not None and not latest.done else None

    def _end(self) -> torch.cuda.Event | None:
        """Records the end of the step that was launched."""
        if self._events is None:
            return None
        events = self._events[self._launches % PAGES]
        arrived = events.timed_end if self._launches % TIMED_EVERY < 2 else events.arrived
        arrived.record(torch.cuda.current_stream(self._executor.device))
        return arrived

    @torch.inference_mode()
    def capture(self, progress: Callable[[str, int, int, str], None]) -> None:
        """Captures every bucket, largest first, in one pool; with `eager` only runs them once."""
        device = self._executor.device
        jobs = [(bucket, filtered) for bucket in reversed(self._buckets) for filtered in (False, True)]
        prefills = [] if self._prefills is None else self._prefills.shapes[::-1]
        if device.type == "cpu":
            return
        bodies = (
            [] if self._prefills is None else [partial(self._prefills.try_shape, each) for each in prefills]
        )
        bodies += [partial(self._body, bucket, filtered) for bucket, filtered in jobs]
        if self._model.ops.uniform:  # kernels of Triton
            compile_together(bodies, lambda done, count: progress("compile", done, count, "kernels"))
        pool = torch.cuda.graph_pool_handle()
        free = torch.cuda.mem_get_info(device)[0]
        count = len(prefills) + len(jobs)
        for done, shape in enumerate(prefills):
            progress("capture", done, count, "graphs")
            assert self._prefills is not None
            self._prefills.capture(shape, pool)
        for done, (bucket, filtered) in enumerate(jobs):
            progress("capture", len(prefills) + done, count, "graphs")
            if self._eager:
                self._body(bucket, filtered)
            else:
                self._graphs[bucket, filtered] = self.captured(bucket, filtered, pool)
        progress("capture", count, count, "graphs")
        self._turn_back()
        torch.cuda.synchronize(device)
        self.graph_bytes = max(0, free - torch.cuda.mem_get_info(device)[0])

    @torch.inference_mode()
    def captured(self, bucket: int, filtered: bool = False, pool: Any = None) -> torch.cuda.CUDAGraph:
        """A graph of the decode part of `bucket` sequences, of those that `place` names when it is replayed.

        pool: of graphs that never run at once.
        """
        self._body(bucket, filtered)  # compiles what is not yet
        torch.cuda.synchronize(self._executor.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._body(bucket, filtered)
        self._turn_back()
        return graph

    def free(self) -> None:
        """Drops the graphs, which hold the caches' addresses."""
        self._graphs.clear()
        if self._prefills is not None:
            self._prefills.free()

    def _decode(self, bucket: int, filtered: bool) -> None:
        graph = self._graphs.get((bucket, filtered))
        if graph is None:
            self._body(bucket, filtered)
        else:
            graph.replay()

    def _body(self, bucket: int, filtered: bool) -> None:
        """The decode part of `bucket` sequences, of the slots in `_slots`."""
        executor, slots = self._executor, self._slots[:bucket]
        hidden, starts = self._model.step(slots, self._registers, executor.block_table, executor.caches)
        self._draw(hidden, slots, starts, self._registers, self._decodes[:, :bucket], filtered)

    def _turn_back(self) -> None:
        """Steps that nobody reads leave the device's turn ahead of the host's."""
        assert self._registers.turn is not None
        self._registers.turn.fill_(self._turn)

    def _prefill(self, plan: StepPlan, page: int) -> int:
        """The prefill part, and the draws of final chunks, to a page of their own; returns how many."""
        executor = self._executor
        hidden = self._prefills.run(plan) if self._prefills is not None else executor.prefill(plan)
        finals = [chunk for chunk in plan.chunks if chunk.final]
        if not finals:
            return 0
        assert hidden is not None
        slots = [chunk.slot for chunk in finals]
        device = executor.device
        index = staged(slots, torch.int32, device)
        at = staged([chunk.start + len(chunk.token_ids) - 1 for chunk in finals], torch.int64, device)
        # the draw moves lengths past a row, the last one of the prompt here
        executor.lengths.index_copy_(0, index.long(), at.to(torch.int32))
        out = self._finals[:, : len(finals)]
        self._draw(hidden, index, at, self._final_registers[page], out, self._sampler.filtered(slots))
        return len(finals)

    def _draw(
        self,
        hidden: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        registers: StepRegisters,
        out: torch.Tensor,
        filtered: bool,
    ) -> None:
        ops = self._model.ops
        logits = self._model.logits(hidden)[:, : self._vocab_size]
        least = ops.filter_thresholds(logits, slots, registers) if filtered else None
        ops.draw_step(logits, slots, starts, registers, out, least)

    def place(self, slots: list[int], bucket: int) -> None:
        """Puts the decode part's slots where the graphs look for them."""
        padded = slots + [0] * (bucket - len(slots))
        if self._in_slots[:bucket] != padded:
            self._slots[:bucket].copy_(staged(padded, torch.int32, self._slots.device))
            self._in_slots[:bucket] = padded

    def _pinned(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int64, pin_memory=self._executor.device.type != "cpu")
