"""One seed gives one stream: alone, among 3, among 16, on one rank and on two."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mstar.daemon.client import AsyncClient, NoDaemon
from mstar.daemon.protocol import Token

SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 0.5},
    {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.2},
    {},
]
PROMPTS = ["Write a short story about a fox.", "Tell me a joke.", "Count from 3 to 20.", "What is a river?"]
REQUESTS = [
    {
        "messages": [{"role": "user", "content": PROMPTS[i % 4]}],
        "seed": 7 * i,
        "max_tokens": 8 + i % 3,
        "ignore_eos": True,
        "return_ids": True,
        **SETTINGS[i % 6],
    }
    for i in range(16)
]


@contextmanager
def running_daemon(folder: Path, *flags: str) -> Iterator[str]:
    address = f"ipc://{folder}/zmq"
    command = [sys.executable, "-m", "mstar.daemon.cli", "--bind", address, "--line", "off", *flags]
    daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield address
    finally:
        daemon.terminate()
        daemon.wait(30)


async def stream(client: AsyncClient, request: dict) -> list[int]:
    events = [event async for event in await client.generate(**request)]
    return [i for event in events if isinstance(event, Token) for i in event.ids or ()]


async def streams(address: str, size: int, indices: range) -> list[list[int]]:
    """The tokens of some requests, `size` of them at a time."""
    async with AsyncClient(address, timeout_s=1.0) as client:
        found: list[list[int]] = []
        for first in range(0, len(indices), size):
            group = indices[first : first + size]
            found += await asyncio.gather(*(stream(client, REQUESTS[i]) for i in group))
        return found


async def load(address: str) -> None:
    async with AsyncClient(address, timeout_s=1.0) as client:
        for _ in range(60):
            try:
                await client.ping()
                break
            except NoDaemon:
                await asyncio.sleep(0.1)
        await client.load("builtin:tiny", dtype="fp32", max_seq=256)


def test_a_seed_gives_one_stream_at_any_batch_size_and_on_two_ranks(tmp_path):
    by_ranks = []
    for tp in (1, 2):
        folder = tmp_path / str(tp)
        folder.mkdir()
        with running_daemon(folder, "--tp", str(tp), "--log-level", "error") as address:
            asyncio.run(load(address))
            together = asyncio.run(streams(address, 16, range(16)))
            assert asyncio.run(streams(address, 3, range(16))) == together
            assert asyncio.run(streams(address, 1, range(6))) == together[:6]
            by_ranks.append(together)
    assert by_ranks[0] == by_ranks[1]
    assert [len(tokens) for tokens in by_ranks[0]] == [request["max_tokens"] for request in REQUESTS]
