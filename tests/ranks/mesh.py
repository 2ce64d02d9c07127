"""A load's ranks as real processes, with this process in the supervisor's place."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from mstar.loader import resolve
from mstar.ranks import messages as m

WAIT_S = 90  # a bound, not a measure


class Mesh:
    """Ranks of one load over ipc. `events` keeps all that was received, heartbeats apart."""

    def __init__(self, tp: int = 1, *, shared_memory: bool = True, **fields: Any) -> None:
        # ipc paths are short: not pytest's
        self.run_dir = Path(tempfile.mkdtemp(prefix="mstar-test-"))
        spec: dict[str, Any] = {
            "model_dir": str(resolve("builtin:tiny")),
            "tp_size": tp,
            "device": "cpu",
            "dtype": "fp32",
            "max_seq": 512,
            "max_num_seqs": 8,
            "memory_fraction": 0.5,
            "overrides": {},
            "threads": 1,
            "run_dir": str(self.run_dir),
            "heartbeat_s": 0.2,
        }
        self.spec = m.LoadSpec(**(spec | fields))
        self.context = zmq.Context()
        self.inbox = self.context.socket(zmq.PULL)
        self.inbox.bind(f"ipc://{self.run_dir}/events")
        self.commands = self.context.socket(zmq.PUSH)
        self.commands.bind(f"ipc://{self.run_dir}/commands")
        (self.run_dir / "load.bin").write_bytes(m.pack(self.spec))
        self.events: list[Any] = []
        self.beats: list[m.Heartbeat] = []
        with tempfile.TemporaryFile() as region:
            os.ftruncate(region.fileno(), m.SHM_REGION_BYTES)
            fd = region.fileno()
            shared = ["--shm-fd", str(fd)] if shared_memory else []
            command = [sys.executable, "-m", "mstar.ranks.worker", "--spec", str(self.run_dir / "load.bin")]
            self.ranks = [
                subprocess.Popen(
                    [*command, "--rank", str(rank), *shared], stdin=subprocess.PIPE, pass_fds=[fd]
                )
                for rank in range(tp)
            ]

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        self.context.destroy(linger=0)
        shutil.rmtree(self.run_dir)

    def receive(self) -> Any:
        """The next event that is not a heartbeat."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if self.inbox.poll(1000):
                event = m.unpack(self.inbox.recv())
                if isinstance(event, m.Heartbeat):
                    self.beats.append(event)
                else:
                    self.events.append(event)
                    return event
        raise AssertionError(f"no event for {WAIT_S} s")

    def wait_for(self, kind: type[Any]) -> Any:
        while True:
            event = self.receive()
            if isinstance(event, kind):
                return event
            assert not isinstance(event, m.Failed), event

    def send(self, command: m.Command) -> None:
        self.commands.send(m.pack(command))

    def submit(self, request_id: int, prompt_ids: list[int], **sampling: Any) -> None:
        params = m.SamplingParams(**({"max_tokens": 16, "seed": 1} | sampling))
        self.send(m.Submit(request_id, prompt_ids, params))

    def finish(self, ids: set[int]) -> dict[int, list[int]]:
        """Tokens of requests, when all of them have ended."""
        tokens: dict[int, list[int]] = {request_id: [] for request_id in ids}
        left = set(ids)
        while left:
            for run in self.wait_for(m.Tokens).runs:
                if run.request_id in tokens:
                    tokens[run.request_id] += run.ids
                    if run.finish is not None:
                        left.discard(run.request_id)
        return tokens

    def stats(self) -> m.EngineStats:
        self.send(m.QueryStats(1))
        result = self.wait_for(m.EngineStats)
        assert isinstance(result, m.EngineStats)
        return result

    def stop(self) -> list[int]:
        """Exit codes after Stop."""
        self.send(m.Stop())
        return [process.wait(WAIT_S) for process in self.ranks]

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.ranks[rank].send_signal(number)
