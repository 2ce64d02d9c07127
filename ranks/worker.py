"""A rank's process: `python -m mstar.ranks.worker --rank R --spec FILE [--shm-fd N]`, started by the supervisor.

Loads its shard, meets the others, then serves: rank 0 runs the engine, the others follow its plans. Ends with 0
after Stop; with 1 after a Failed that says why; at once when the daemon is gone.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import zmq

from mstar.loader.errors import LoadError
from mstar.ranks import shard as shards
from mstar.ranks.cache import BLOCK_SIZE
from mstar.ranks.device_steps import DeviceSteps
from mstar.ranks.engine import Engine
from mstar.ranks.executor import Executor
from mstar.ranks.leader import Leader
from mstar.ranks.lifeline import Pulse, follow_parent, resident_bytes, start_heartbeat
from mstar.ranks.lines import POLL_S, Context, EventLine, FollowerLine, LeaderLine, Socket, open_socket
from mstar.ranks.memory import OutOfMemory, Sizes, size_caches
from mstar.ranks.messages import Failed, Hello, LoadSpec, Progress, Ready, unpack
from mstar.ranks.plan import DECODE_BUCKETS, Setup, StepPlan, StopPlan, decode_buckets
from mstar.ranks.sampler import Sampler
from mstar.ranks.scheduler import Limits, Scheduler
from mstar.ranks.speculation.backend import MeshBackend, SlotBackend, TrunkBackend
from mstar.ranks.speculation.policy import Policy
from mstar.ranks.warmup import warm_up

log = logging.getLogger(__name__)

# A stage of the load that shows no progress for this long has hung; a step (all collectives in it included) too.
STAGE_LIMIT_S = 900.0
STEP_LIMIT_S = 120.0

# Prompt tokens a step. On a CPU prefill's rate is flat from about 128 rows on, so beside decodes a step takes
# no more: a stream's next token waits for 128 rows, not 512. A GPU needs more rows to be busy.
CPU_PREFILL_BUDGET, CPU_MIXED_BUDGET = 512, 128
GPU_PREFILL_BUDGET, GPU_MIXED_BUDGET = 4096, 1024

COMMANDS_A_STEP = 256  # drained between two steps: a burst of submits delays nobody's step by more


class Rank:
    """One rank from its first socket to its last step."""

    def __init__(self, rank: int, spec: LoadSpec, shm_fd: int | None) -> None:
        self.rank, self.spec = rank, spec
        self._shm_fd = shm_fd
        self._run_dir = Path(spec.run_dir)
        self._context: Context = zmq.Context()
        self._pulse = Pulse()
        self._pulse.within(STAGE_LIMIT_S)
        events = f"ipc://{self._run_dir}/events"
        self._events = EventLine(self._context, events, self._pulse)
        self._events.send(Hello(rank, os.getpid()))
        held: Callable[[], int] = resident_bytes
        if spec.device != "cpu" and torch.cuda.device_count():  # else `run` says what is missing
            held = partial(torch.cuda.memory_allocated, shards.rank_device(spec, rank))
        self._end_heartbeat = start_heartbeat(
            self._pulse, self._context, events, rank, spec.heartbeat_s, held
        )

    def run(self) -> int:
        """Serves until Stop. Returns the exit code."""
        try:
            if self.rank == 0:
                self._lead()
            else:
                self._follow()
            return 0
        except Exception as error:
            failed = _failed(self.rank, error)
            # of what has a class of its own the message says all
            fault = error if failed.error_class == "internal" else None
            log.error("rank %d: %s", self.rank, failed.message, exc_info=fault)
            self._events.send(failed)
            return 1
        finally:
            self._end_heartbeat()
            self._events.close()
            self._context.term()

    def _lead(self) -> None:
        line = LeaderLine(self._context, self._run_dir, self.spec.tp_size, self._pulse)
        commands = open_socket(self._context, zmq.PULL, f"ipc://{self._run_dir}/commands")
        try:
            shard = self._load()
            shakes = line.wait_for_followers()
            # measured again: all weights are in memory now
            own = shard.budget_bytes()
            sizes = self._size(shard, min([own, *(shake.budget_bytes for shake in shakes)]), own)
            setup = Setup(sizes.kv_blocks, sizes.slots)
            line.send(setup)
            sampler = Sampler(shard.config.vocab_size, sizes.slots, shard.device)
            backend: TrunkBackend
            executor, vocab_size = shard.executor(setup), shard.config.vocab_size
            if self.spec.tp_size == 1:
                backend = SlotBackend(executor, vocab_size)
            else:
                backend = MeshBackend(executor, shard.collective, vocab_size, line.send)
            limits = self._limits(sizes)
            steps = self._device_steps(shard, executor, sampler)
            leader = Leader(backend, sampler, shard.chain(setup), steps)
            if steps is not None:
                steps.capture(self._progress)

            number, costs = warm_up(limits, sampler, leader, self._progress, costs=not self.spec.spec_fixed)
            policy = Policy(limits.drafts, costs)
            engine = Engine(Scheduler(limits, sampler, number, policy), leader, self._events.send)
            graph_bytes = None if steps is None else steps.graph_bytes
            self._events.send(self._ready(shard, sizes, graph_bytes))
            self._serve(engine, commands)
            line.send(StopPlan())
            leader.free()
            shard.collective.close()
        finally:
            commands.close()
            line.close()

    def _serve(self, engine: Engine, commands: Socket) -> None:
        """Runs steps while there is work, and waits for commands otherwise; returns at Stop."""
        pulse = self._pulse
        while True:
            pulse.within(STEP_LIMIT_S)
            pulse.running, pulse.waiting = engine.running, engine.waiting
            if engine.idle and not commands.poll(int(POLL_S * 1000)):
                continue
            for _ in range(COMMANDS_A_STEP):
                try:
                    data = commands.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if not engine.handle(unpack(data)):
                    return
            engine.step()

    def _follow(self) -> None:
        line = FollowerLine(self._context, self._run_dir, self.rank, self._pulse)
        try:
            shard = self._load()
            line.shake(shard.budget_bytes())
            setup = line.receive()
            if not isinstance(setup, Setup):
                raise RuntimeError(f"rank 0 began with {type(setup).__name__} instead of Setup")
            self._pulse.within(STAGE_LIMIT_S)
            backend = MeshBackend(shard.executor(setup), shard.collective, shard.config.vocab_size)
            number = 0
            while isinstance(plan := line.receive(), StepPlan):
                number += 1
                if plan.number != number:
                    raise RuntimeError(f"step {plan.number} came where {number} was due")
                self._pulse.within(STEP_LIMIT_S)
                backend.follow(plan)
            backend.free()
            shard.collective.close()
        finally:
            line.close()

    def _load(self) -> shards.Shard:
        shard = shards.load(self.spec, self.rank, self._shm_fd, self._progress)
        self._pulse.within(STAGE_LIMIT_S)
        return shard

    def _progress(self, stage: str, done: int, total: int, unit: str) -> None:
        self._pulse.within(STAGE_LIMIT_S)
        self._events.send(Progress(self.rank, stage, done, total, unit))

    def _size(self, shard: shards.Shard, budget_bytes: int, leader_budget_bytes: int) -> Sizes:
        spec, on_cpu = self.spec, shard.device.type == "cpu"
        return size_caches(
            shard.config,
            spec.tp_size,
            shard.dtype,
            max_seq=spec.max_seq,
            max_num_seqs=spec.max_num_seqs,
            step_rows=(CPU_PREFILL_BUDGET if on_cpu else GPU_PREFILL_BUDGET)
            + spec.max_num_seqs * (1 + spec.spec_k),
            budget_bytes=budget_bytes,
            on_cpu=on_cpu,
            drafts=spec.spec_k,
            leader_budget_bytes=leader_budget_bytes,
            ring=shard.trunk.ops.ring,
        )

    def _device_steps(self, shard: shards.Shard, executor: Executor, sampler: Sampler) -> DeviceSteps | None:
        """Where steps need not be waited for: one GPU, and kernels that keep all of a step on it."""
        if self.spec.tp_size > 1 or not shard.trunk.ops.uniform:
            return None
        buckets = decode_buckets(self.spec.max_num_seqs)
        return DeviceSteps(executor, sampler, shard.config.vocab_size, buckets, self.spec.eager)

    def _limits(self, sizes: Sizes) -> Limits:
        on_cpu = self.spec.device == "cpu"
        return Limits(
            max_seq=self.spec.max_seq,
            max_num_seqs=self.spec.max_num_seqs,
            kv_blocks=sizes.kv_blocks - 1,
            prefill_budget=CPU_PREFILL_BUDGET if on_cpu else GPU_PREFILL_BUDGET,
            mixed_budget=CPU_MIXED_BUDGET if on_cpu else GPU_MIXED_BUDGET,
            drafts=self.spec.spec_k,
            buckets=() if on_cpu else DECODE_BUCKETS,
        )

    def _ready(self, shard: shards.Shard, sizes: Sizes, graph_bytes: int | None) -> Ready:
        memory = {
            "weights": shard.weight_bytes,
            "kv": sizes.kv_bytes,
            "states": sizes.state_bytes,
            "workspace": sizes.workspace_bytes,
        }
        if shard.head is not None:
            memory |= {"head": shard.head_bytes, "head_kv": sizes.head_kv_bytes}
        if graph_bytes is not None:
            memory["graphs"] = graph_bytes
        parts = ", ".join(f"{name} {count / 2**20:,.1f} MiB" for name, count in memory.items())
        tokens = (sizes.kv_blocks - 1) * BLOCK_SIZE
        log.info("rank 0 holds: %s; KV for %d tokens, %d slots", parts, tokens, sizes.slots - 1)
        return Ready(
            params=shard.trunk.params,
            dtype=self.spec.dtype,
            device=shards.device_name(self.spec, shard.device),
            kv_blocks=sizes.kv_blocks - 1,
            block_size=BLOCK_SIZE,
            slots=sizes.slots - 1,
            memory=memory,
            notes=shard.notes,
        )


def _failed(rank: int, error: Exception) -> Failed:
    if isinstance(error, LoadError):
        return Failed(rank, error.error_class, error.message, error.field)
    if isinstance(error, OutOfMemory):
        return Failed(rank, "out_of_memory", str(error))
    # torch's CPU allocator raises a plain RuntimeError
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        advice = "lower max_num_seqs, max_seq or memory_fraction, or use a larger tp"
        return Failed(rank, "out_of_memory", f"rank {rank} ran out of memory ({error}): {advice}")
    return Failed(rank, "internal", f"rank {rank}: {type(error).__name__}: {error}")


def main(argv: list[str] | None = None) -> int:
    """Runs one rank; returns its exit code."""
    parser = argparse.ArgumentParser(prog="mstar.ranks.worker", description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--spec", type=Path, required=True, help="a packed LoadSpec")
    parser.add_argument("--shm-fd", type=int, help="of the region for shared-memory collectives")
    options = parser.parse_args(argv)
    follow_parent()
    logging.basicConfig(level=logging.INFO, format=f"rank {options.rank}: %(message)s", stream=sys.stderr)
    spec = unpack(options.spec.read_bytes())
    assert isinstance(spec, LoadSpec)
    return Rank(options.rank, spec, options.shm_fd).run()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # All is closed; tearing the interpreter down with torch in it takes up to 2 s of the unload.
    os._exit(code)
