"""A daemon without a model, for tests of clients: a ROUTER on a Unix socket that answers by script.

It speaks msgpack itself, not through the codec, so that both ends are not wrong together. A prompt
says what it answers: `hold` (gen_start, then nothing until an abort), `fail`, `cut` (a token, and somebody
else ends it), `flood N` (N tokens at once), `think` (reasoning, then text); any other prompt comes back word by
word.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from types import TracebackType
from typing import Any, Self

import msgpack
import zmq

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "reasoning_tokens": 1, "cached_tokens": 0}
TIMINGS = {
    "queue_ms": 0.1, "ttft_ms": 12.0, "prefill_ms": 11.0, "prefill_tok_s": 270.0, "decode_ms": 10.0,
    "decode_tok_s": 100.0,
}  # fmt: skip
SPEC = {"mtp": False, "k": 0, "steps": 0, "drafted": 0, "accepted": 0, "tau": 0.0, "tokens_per_step": 1.0}
LOADED = {
    "model": "m", "fingerprint": "f", "arch": "qwen3_5", "layers": 4, "hidden": 64, "vocab": 99, "params": 5_000_000,
    "tp": 1, "device": "cpu", "dtype": "bf16", "max_seq": 512, "max_num_seqs": 8,
    "kv": {"dtype": "bf16", "blocks": 9, "tokens": 144},
    "spec": {"mtp": False, "k": 0, "draft_head": None, "reason": "not built"}, "load_ms": 12.5, "memory": {},
    "notes": ["a note"],
}  # fmt: skip
POOL = {"total": 9, "used": 2, "free": 7}
RANK = {"rank": 0, "pid": 77, "device": "cpu", "memory_bytes": 1 << 25, "last_heartbeat_ms": 120.0}
ANSWERS: dict[str, list[dict[str, Any]]] = {
    "ping": [{"type": "pong"}],
    "unload": [{"type": "unloaded"}],
    "reset": [{"type": "reset_done"}],
    "shutdown": [{"type": "shutting_down"}],
    "load": [
        {"type": "load_progress", "stage": "read", "done": 1 << 20, "total": 2 << 20, "unit": "bytes"},
        {"type": "load_progress", "stage": "read", "done": 2 << 20, "total": 2 << 20, "unit": "bytes"},
        {"type": "load_progress", "stage": "warmup", "done": 3, "total": 3, "unit": "steps"},
        {"type": "loaded", **LOADED},
    ],
    "status": [{"type": "status", "state": "ready", "running": 1, "waiting": 0, "loaded": LOADED, "ranks": [RANK]}],
    "stats": [
        {
            "type": "stats", "requests": {"stop": 4}, "tokens": {"prompt": 9}, "steps": 5, "preemptions": 0,
            "blocks": POOL, "slots": POOL, "queues": {"live": 1}, "engine": {},
            "spec": {"k": 0, "steps": 0, "drafted": [], "accepted": []},
        }
    ],
}  # fmt: skip


class ScriptedDaemon:
    """Serves from `with`; `address` is a fresh Unix socket. `received` lists what came, pings left out."""

    def __init__(self) -> None:
        self._dir = tempfile.mkdtemp(prefix="mstar-scripted-")
        self.address = f"ipc://{self._dir}/daemon"
        self.received: list[dict[str, Any]] = []
        self.pings = 0
        self.silent = False  # reads and says nothing
        self.failing: dict[str, dict[str, Any]] = {}  # request type to the `error` it gets
        self._holding: dict[tuple[bytes, Any, int], None] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self._dir)

    def stop(self) -> None:
        """Goes away as a killed daemon does: without a word."""
        self._ending.set()
        self._thread.join()

    def wait_for(self, kind: str, count: int = 1, timeout_s: float = 20.0) -> list[dict[str, Any]]:
        """The requests of this type, once there are so many."""
        deadline = time.monotonic() + timeout_s
        while len(found := [m for m in list(self.received) if m["type"] == kind]) < count:
            assert time.monotonic() < deadline, f"no {count} {kind} in {self.received}"
            time.sleep(0.01)
        return found

    def answers(self, peer: bytes, request: dict[str, Any]) -> list[Any]:
        """What one request gets."""
        kind = request["type"]
        if kind == "ping":
            self.pings += 1
        else:
            self.received.append(request)
        if self.silent:
            return []
        keys = {k: request[k] for k in ("id", "attempt_id") if k in request}
        if kind in self.failing:
            return [{"type": "error", "retryable": False, **self.failing[kind], **keys}]
        if kind == "abort":
            held = self._holding.pop((peer, request["id"], request["attempt_id"]), 0)
            return [] if held == 0 else [{**_done("abort"), **keys}]
        if kind == "generate":
            return [{**event, **keys} for event in self._generate(peer, request)]
        events = ANSWERS[kind]
        if request.get("model") == "slow":  # a load that does not end
            events = events[:1]
        return [{**event, **keys} for event in events]

    def _serve(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.bind(self.address)
            while not self._ending.is_set():
                if socket.poll(20):
                    peer, data = socket.recv_multipart()
                    for event in self.answers(peer, msgpack.unpackb(data)):
                        socket.send_multipart([peer, msgpack.packb(event)])

    def _generate(self, peer: bytes, request: dict[str, Any]) -> list[dict[str, Any]]:
        prompt = request.get("prompt") or request["messages"][-1]["content"]
        start = {
            "type": "gen_start",
            "prompt_tokens": 3,
            "cached_tokens": 0,
            "started_in_think": False,
            "seed": 1,
        }
        if prompt == "fail":
            error = {"class": "context_length", "message": "too long", "field": "prompt", "retryable": False}
            return [{"type": "error", **error}]
        if prompt == "hold":
            self._holding[peer, request["id"], request["attempt_id"]] = None
            return [start, {"type": "token", "text": "held "}]
        if prompt == "cut":
            return [start, {"type": "token", "text": "cut "}, _done("abort")]
        if prompt.startswith("flood "):
            return [start, *[{"type": "token", "text": "x"}] * int(prompt[6:]), _done("length")]
        thought = [{"type": "reasoning", "text": "hm"}] if prompt == "think" else []
        return [start, *thought, *[{"type": "token", "text": w + " "} for w in prompt.split()], _done("stop")]


def _done(reason: str) -> dict[str, Any]:
    return {
        "type": "done", "finish_reason": reason, "usage": USAGE, "open_think": False, "timings": TIMINGS, "spec": SPEC,
    }  # fmt: skip
