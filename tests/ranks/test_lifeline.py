"""The heartbeat and the bounded sends, without a model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from mstar.loader import read_config, resolve
from mstar.ranks import lines, memory
from mstar.ranks.lifeline import Pulse, resident_bytes, start_heartbeat
from mstar.ranks.messages import Heartbeat, unpack


def test_heart_stops_beating_when_the_main_loop_breaks_its_promise() -> None:
    context = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.bind("inproc://events")
    pulse = Pulse()
    pulse.within(3600)
    pulse.running = 3
    end = start_heartbeat(pulse, context, "inproc://events", 5, 0.01, resident_bytes)
    beat = unpack(inbox.recv())
    assert isinstance(beat, Heartbeat)
    assert (beat.rank, beat.running, beat.waiting) == (5, 3, 0)
    assert beat.memory_bytes > 0
    pulse.within(-1)
    time.sleep(0.2)
    while inbox.poll(0):
        inbox.recv()
    assert inbox.poll(200) == 0
    pulse.within(3600)
    assert inbox.poll(10_000)
    end()
    inbox.close()
    context.term()


def test_send_to_a_peer_that_takes_nothing_ends_by_its_bound_and_keeps_the_pulse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lines, "SEND_LIMIT_S", 0.05)
    monkeypatch.setattr(lines, "POLL_S", 0.02)
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind("inproc://nobody")
    pulse = Pulse()
    with pytest.raises(lines.LineDown, match="rank 1 took nothing"):
        lines.send_bounded(socket, b"plan", pulse, "rank 1")
    assert pulse.fresh
    socket.close()
    context.term()


def test_what_was_promised_before_a_wait_holds_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that waited for the other ranks has its minutes for what comes then, gigabytes of caches."""
    monkeypatch.setattr(lines, "WAIT_LIMIT_S", -1.0)  # it has passed when the wait ends
    context = zmq.Context()
    inbox, outbox = (context.socket(kind) for kind in (zmq.PULL, zmq.PUSH))
    inbox.bind("inproc://line")
    outbox.connect("inproc://line")
    pulse = Pulse()
    pulse.within(3600)
    lines.send_bounded(outbox, b"setup", pulse, "rank 1")
    assert lines.receive(inbox, pulse) == b"setup"
    assert pulse.fresh
    inbox.close()
    outbox.close()
    context.term()


def test_process_ends_at_eof_of_its_stdin_and_ignores_the_terminals_signals() -> None:
    body = (
        "import os, signal, time\n"
        "from mstar.ranks.lifeline import follow_parent\n"
        "follow_parent()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('alive', flush=True)\n"
        "time.sleep(100)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", body], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == b"alive\n"
    process.stdin.close()
    assert process.wait(60) == 1
    process.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
def test_killed_daemon_ends_even_a_stopped_rank() -> None:
    rank = (
        "import time\n"
        "from mstar.ranks.lifeline import follow_parent\n"
        "follow_parent()\n"
        "print('alive', flush=True)\n"
        "time.sleep(100)\n"
    )
    daemon = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {rank!r}], stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", daemon], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert process.stdout.readline() == "alive\n"
    os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.wait()
    # the rank holds the other end of this pipe as its stdout until it ends
    assert process.stdout.read() == ""
    process.stdout.close()


def sizes(budget_bytes: int, **changes: int | bool) -> memory.Sizes:
    import torch

    config = read_config(resolve("builtin:tiny"))
    fields: dict[str, int | bool] = {"max_seq": 1024, "max_num_seqs": 4, "step_rows": 64, "on_cpu": True}
    return memory.size_caches(config, 1, torch.bfloat16, budget_bytes=budget_bytes, **(fields | changes))  # type: ignore[arg-type]


def test_kv_is_what_all_sequences_want_or_what_is_free() -> None:
    ample = sizes(2**40)
    assert (ample.kv_blocks, ample.slots) == (4 * 64 + 1, 5)
    fixed = ample.state_bytes + ample.workspace_bytes
    block = ample.kv_bytes // ample.kv_blocks
    tight = sizes(fixed + 101 * block)
    assert tight.kv_blocks == 101
    assert fixed + tight.kv_bytes <= fixed + 101 * block
    capped = sizes(2**60, max_seq=4096, max_num_seqs=100_000)
    assert capped.kv_bytes <= memory.CPU_KV_CAP_BYTES + block
    with pytest.raises(memory.OutOfMemory, match=r"lower max_seq to 1008 or less"):
        sizes(fixed + 64 * block)
    with pytest.raises(memory.OutOfMemory, match="lower max_num_seqs"):
        sizes(1000)


def test_drafts_cost_windows_on_every_rank_and_the_heads_kv_on_rank_0() -> None:
    plain, ample = sizes(2**40), sizes(2**40, drafts=3)
    assert (ample.kv_blocks, ample.kv_bytes) == (plain.kv_blocks, plain.kv_bytes)
    assert ample.state_bytes > plain.state_bytes and ample.workspace_bytes > plain.workspace_bytes
    # one layer beside the trunk's two with attention
    assert (plain.head_kv_bytes, ample.head_kv_bytes) == (0, ample.kv_bytes // 2)
    fixed = ample.state_bytes + ample.workspace_bytes
    block = ample.kv_bytes // ample.kv_blocks
    budget = fixed + 150 * block
    assert sizes(budget, drafts=3).kv_blocks == 100
    # rank 0 may have more left than the least, or the least of all
    assert sizes(budget, drafts=3, leader_budget_bytes=budget + 45 * block).kv_blocks == 130
    assert sizes(budget, drafts=3, leader_budget_bytes=budget + 90 * block).kv_blocks == 150


def test_host_memory_is_split_over_ranks() -> None:
    available = memory.available_host_bytes()
    assert 0 < available < 2**50
    assert memory.host_budget_bytes(0.5, 4) <= available
    assert Path("/proc/meminfo").exists() or sys.platform != "linux"
