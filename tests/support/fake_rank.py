"""A rank without a model: speaks the ranks' messages, 'generates' scripted ids, and fails on command.

Started like the real one, with `--script JSON` in front. Keys of the script (all optional):
  ready_after_s       before Ready (0)
  never_ready         stay silent but alive
  fail                {"rank": R, "error_class": C, "message": M, "field": F}: Failed, then exit 1
  die_at_load         {"rank": R, "code": N}: exit without a word
  ids                 the ids to generate, in a circle ([65, 66, 67])
  windows             [[drafted, accepted], ...] of a speculating request's decode steps, in a circle ([])
  step_s              between steps (0)
  hold                never admit a request
  refuse              {"error_class": C, "message": M}: refuse every request
  die_after           {"rank": R, "steps": N}: SIGKILL to rank R after N steps
  stop_after          {"rank": R, "steps": N}: SIGSTOP to rank R after N steps
  child               every rank starts a child process that outlives it unless it is killed
  deaf                ignore Stop
  mute_stats          never answer QueryStats
  talk                print this line at the start
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import zmq

from mstar.ranks import messages


def command(**script: Any) -> list[str]:
    """The command line for a `Mesh`."""
    return [sys.executable, str(Path(__file__).resolve()), "--script", json.dumps(script)]


class SpecTotals:
    """What `EngineStats` says of speculation."""

    def __init__(self, k: int) -> None:
        self.k, self.steps = k, 0
        self.drafted, self.accepted = [0] * k, [0] * k

    def take(self, drafted: int, accepted: int) -> None:
        self.steps += bool(self.k)
        for totals, count in ((self.drafted, drafted), (self.accepted, accepted)):
            for depth in range(count):
                totals[depth] += 1


class FakeRank:
    def __init__(self, rank: int, spec: messages.LoadSpec, script: dict[str, Any]) -> None:
        self.rank, self.load, self.script = rank, spec, script
        self.context = zmq.Context()
        self.events = self.connect(zmq.PUSH, "events")
        self.lock = threading.Lock()
        self.live: dict[int, list[Any]] = {}  # request id -> [sampling, tokens given, steps]
        self.spec = SpecTotals(spec.spec_k)
        self.waiting: dict[int, Any] = {}
        self.pids: dict[int, int] = {}
        self.steps = 0

    def connect(self, kind: int, name: str, bind: bool = False) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        (socket.bind if bind else socket.connect)(f"ipc://{self.load.run_dir}/{name}")
        return socket

    def send(self, event: Any) -> None:
        with self.lock:
            self.events.send(messages.pack(event))

    def heartbeat(self) -> None:
        while True:
            self.send(messages.Heartbeat(self.rank, 1 << 20, len(self.live), len(self.waiting)))
            time.sleep(self.load.heartbeat_s)

    def mine(self, key: str) -> dict[str, Any] | None:
        fault = self.script.get(key)
        return fault if fault and fault.get("rank", 0) == self.rank else None

    def run(self) -> None:
        if "talk" in self.script:
            print(self.script["talk"], flush=True)
        if self.script.get("child"):
            child = subprocess.Popen(["sleep", "600"])
            print(f"child {child.pid}", flush=True)
        self.send(messages.Hello(self.rank, os.getpid()))
        threading.Thread(target=self.heartbeat, daemon=True).start()
        self.send(messages.Progress(self.rank, "read", 50, 100, "bytes"))
        if fault := self.mine("die_at_load"):
            print("no luck today", flush=True)
            os._exit(fault.get("code", 3))
        if fault := self.mine("fail"):
            self.send(messages.Failed(self.rank, fault["error_class"], fault["message"], fault.get("field")))
            time.sleep(0.2)
            os._exit(1)
        self.send(messages.Progress(self.rank, "read", 100, 100, "bytes"))
        if self.rank:
            self.follow()
        else:
            self.lead()

    def follow(self) -> None:
        shakes, plans = self.connect(zmq.PUSH, "shakes"), self.connect(zmq.PULL, f"plans-{self.rank}")
        shakes.send(b"%d %d" % (self.rank, os.getpid()))
        while plans.recv() != b"stop":
            pass

    def lead(self) -> None:
        followers = range(1, self.load.tp_size)
        shakes = self.connect(zmq.PULL, "shakes", bind=True)
        plans = [self.connect(zmq.PUSH, f"plans-{rank}", bind=True) for rank in followers]
        commands = self.connect(zmq.PULL, "commands")
        self.pids[0] = os.getpid()
        for _ in followers:
            rank, pid = shakes.recv().split()
            self.pids[int(rank)] = int(pid)
        time.sleep(self.script.get("ready_after_s", 0))
        if self.script.get("never_ready"):
            time.sleep(600)
        memory = {"weights": 1000, "kv": 2000}
        self.send(messages.Ready(1234, self.load.dtype, "fake", 100, 16, self.load.max_num_seqs, memory, []))
        while True:
            while commands.poll(0 if self.live else 20):
                message = messages.unpack(commands.recv())
                if isinstance(message, messages.Stop):
                    if not self.script.get("deaf"):
                        for plan in plans:
                            plan.send(b"stop")
                        self.context.destroy(linger=1000)
                        return
                else:
                    self.take(message)
            if self.live:
                self.step()

    def take(self, message: Any) -> None:
        if isinstance(message, messages.Abort):
            self.live.pop(message.request_id, None)
            self.waiting.pop(message.request_id, None)
        elif isinstance(message, messages.QueryStats):
            if not self.script.get("mute_stats"):
                used = len(self.live)
                self.send(
                    messages.EngineStats(
                        message.query_id,
                        used,
                        len(self.waiting),
                        self.steps,
                        0,
                        0,
                        0,
                        100,
                        100 - used,
                        64,
                        64 - used,
                        {},
                        self.spec.k,
                        self.spec.steps,
                        self.spec.drafted,
                        self.spec.accepted,
                    )
                )
        elif refusal := self.script.get("refuse"):
            self.send(messages.Refused(message.request_id, refusal["error_class"], refusal["message"]))
        elif self.script.get("hold"):
            self.waiting[message.request_id] = message
        else:
            self.live[message.request_id] = [message.sampling, 0, 0]
            self.send(messages.Started(message.request_id, 0, time.monotonic()))

    def step(self) -> None:
        time.sleep(self.script.get("step_s", 0))
        self.steps += 1
        for key, number in (("die_after", signal.SIGKILL), ("stop_after", signal.SIGSTOP)):
            fault = self.script.get(key)
            if fault and self.steps == fault["steps"]:
                os.kill(self.pids[fault.get("rank", 0)], number)
        runs = [self.run_of(request_id, state) for request_id, state in list(self.live.items())]
        self.send(messages.Tokens(runs, time.monotonic()))

    def run_of(self, request_id: int, state: list[Any]) -> messages.TokenRun:
        """One request's step: a token, or a window cut at its first terminator as the engine cuts it."""
        sampling, given, step = state
        ids = self.script.get("ids", [65, 66, 67])
        drafted, accepted = self.window(sampling, step)
        run, finish = [], None
        for token in (ids[(given + row) % len(ids)] for row in range(accepted + 1)):
            run.append(token)
            if token in sampling.eos_ids or token in sampling.stop_ids:
                finish = "stop"
            elif given + len(run) >= sampling.max_tokens:
                finish = "length"
            if finish:
                del self.live[request_id]
                break
        state[1:] = given + len(run), step + 1
        accepted = min(accepted, len(run))
        if drafted is not None and sampling.spec_k != 0:
            self.spec.take(drafted, accepted)
        best = None
        if sampling.logprobs is not None:
            best = [[-token / 100, [[token, -token / 100]][: sampling.logprobs]] for token in run]
        return messages.TokenRun(request_id, run, finish, best, drafted, accepted)

    def window(self, sampling: messages.SamplingParams, step: int) -> tuple[int | None, int]:
        """(drafted, accepted) of a request's step: the first is its prefill's."""
        if not step:
            return None, 0
        most = self.load.spec_k if sampling.spec_k is None else sampling.spec_k
        windows = self.script.get("windows", [])
        if not most or not windows:
            return 0, 0
        drafted, accepted = windows[(step - 1) % len(windows)]
        return min(drafted, most), min(accepted, most)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--script", "--rank", "--spec", "--shm-fd"):
        parser.add_argument(name)
    args = parser.parse_args()
    os.fstat(int(args.shm_fd))
    spec = messages.unpack(Path(args.spec).read_bytes())

    def end_with_daemon() -> None:
        os.read(0, 1)  # not sys.stdin, whose lock a thread would hold while the interpreter ends
        os._exit(0)

    threading.Thread(target=end_with_daemon, daemon=True).start()
    FakeRank(int(args.rank), spec, json.loads(args.script)).run()


if __name__ == "__main__":
    main()
