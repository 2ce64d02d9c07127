"""Ranks as processes over ipc, on the built-in model: serving, ends, and ranks that are lost or hang."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch

from mstar.loader.errors import LoadError
from mstar.ranks import messages as m
from mstar.ranks.shard import rank_device
from tests.ranks.mesh import WAIT_S, Mesh

PROMPTS = {1: [5], 2: list(range(100, 165)), 3: [7, 8, 9] * 50, 4: [11, 12]}
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "seed": 42, "repetition_penalty": 1.1, "logprobs": 1}


def serve(mesh: Mesh) -> dict[int, list[int]]:
    for request_id, prompt in PROMPTS.items():
        mesh.submit(request_id, prompt, max_tokens=24, **(SAMPLED if request_id == 4 else {}))
    tokens = mesh.finish(set(PROMPTS))
    stats = mesh.stats()
    assert (stats.blocks_free, stats.slots_free) == (stats.blocks_total, stats.slots_total)
    return tokens


@pytest.fixture(scope="module")
def one_rank() -> dict[int, list[int]]:
    with Mesh(1) as mesh:
        hello = mesh.receive()
        assert hello == m.Hello(0, mesh.ranks[0].pid)
        ready = mesh.wait_for(m.Ready)
        assert (ready.dtype, ready.block_size, ready.slots) == ("fp32", 16, 8)
        assert ready.kv_blocks == 8 * 512 // 16
        assert set(ready.memory) == {"weights", "kv", "states", "workspace"}
        assert ready.params > 10_000_000
        stages = [event.stage for event in mesh.events if isinstance(event, m.Progress)]
        assert stages[0] == "read" and stages[-1] == "warmup"
        tokens = serve(mesh)
        logprobs = [run.logprobs for e in mesh.events if isinstance(e, m.Tokens) for run in e.runs]
        assert sum(entry is not None for entry in logprobs) == 24
        while not mesh.beats:  # it beats while idle
            mesh.stats()
        assert mesh.beats[0].memory_bytes > 2**20
        assert mesh.stop() == [0]
    return tokens


@pytest.mark.parametrize(("tp", "shared_memory"), [(2, True), (4, True), (2, False)])
def test_mesh_gives_the_tokens_of_one_rank_and_ends_in_order(
    one_rank: dict[int, list[int]], tp: int, shared_memory: bool
) -> None:
    """In float32, greedy and sampled, over shared memory and over gloo."""
    with Mesh(tp, shared_memory=shared_memory, dtype="fp32") as mesh:
        ready = mesh.wait_for(m.Ready)
        assert any("gloo" in note for note in ready.notes) != shared_memory
        assert serve(mesh) == one_rank
        assert mesh.stop() == [0] * tp


def test_stopped_follower_misses_its_beats_and_every_rank_ends_with_its_daemon() -> None:
    with Mesh(2) as mesh:
        mesh.wait_for(m.Ready)
        mesh.submit(1, [1, 2, 3], max_tokens=500)
        mesh.wait_for(m.Tokens)
        mesh.signal(1, signal.SIGSTOP)
        time.sleep(1)  # 5 intervals
        while mesh.inbox.poll(0):
            mesh.inbox.recv()
        deadline = time.monotonic() + WAIT_S
        beats: set[int] = set()
        while len(beats) == 0 or time.monotonic() < deadline - WAIT_S + 1:
            event = m.unpack(mesh.inbox.recv())
            assert isinstance(event, m.Heartbeat)
            beats.add(event.rank)
        assert beats == {0}
        mesh.signal(1, signal.SIGCONT)
        for process in mesh.ranks:
            assert process.stdin is not None
            process.stdin.close()
        for process in mesh.ranks:
            assert process.wait(WAIT_S) == 1


def test_shard_that_cannot_be_read_is_said_by_name(tmp_path: Path) -> None:
    with Mesh(1, model_dir=str(tmp_path)) as mesh:
        failed = mesh.receive()
        while not isinstance(failed, m.Failed):
            failed = mesh.receive()
        assert (failed.error_class, failed.field) == ("validation", "model")
        assert mesh.ranks[0].wait(WAIT_S) == 1


def test_context_that_does_not_fit_the_memory_is_refused_with_what_to_change() -> None:
    with Mesh(1, memory_fraction=1e-4) as mesh:
        failed = mesh.receive()
        while not isinstance(failed, m.Failed):
            failed = mesh.receive()
        assert failed.error_class == "out_of_memory"
        assert "max_num_seqs" in failed.message and "memory_fraction" in failed.message
        assert mesh.ranks[0].wait(WAIT_S) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: asking for one is no error")
def test_a_rank_that_finds_no_gpu_says_so_and_ends() -> None:
    with Mesh(1, device="cuda") as mesh:
        failed = mesh.receive()
        while not isinstance(failed, m.Failed):
            failed = mesh.receive()
        assert (failed.error_class, failed.field) == ("unsupported", "device")
        assert mesh.ranks[0].wait(WAIT_S) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: asking for one is no error")
def test_a_load_on_a_gpu_that_is_not_there_says_so():
    spec = m.LoadSpec("m", 1, "cuda", "bf16", 64, 1, 0.9, {}, 1, "")
    with pytest.raises(LoadError, match="sees no GPU"):
        rank_device(spec, 0)
