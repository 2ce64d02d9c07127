"""Asks a daemon many requests at once and keeps the tokens of their answers; the checks compare them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mstar.daemon.client import AsyncClient
from mstar.daemon.protocol import Done, Reasoning, Token

CONNECT_S = 10.0


@dataclass(slots=True)
class Answer:
    """What one request got. entries: one a token where logprobs were asked for: [logprob, [[id, logprob], ...]]."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    entries: list[tuple[float | None, list[tuple[int, float | None]]]] = field(default_factory=list)
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def outcome(self) -> tuple[list[int], str, str]:
        """What must be equal between two runs."""
        return self.ids, self.text, self.finish


def ask_all(address: str, requests: Sequence[dict[str, Any]], concurrency: int) -> list[Answer]:
    """Answers in the order of the requests, `concurrency` of which run at once.

    requests: `generate` fields without keys. Raises DaemonError and NoDaemon as the client does.
    """
    return asyncio.run(_ask_all(address, requests, concurrency))


async def _ask_all(address: str, requests: Sequence[dict[str, Any]], concurrency: int) -> list[Answer]:
    places = asyncio.Semaphore(concurrency)
    async with AsyncClient(address, timeout_s=CONNECT_S) as client:

        async def ask(request: dict[str, Any]) -> Answer:
            async with places:
                return await _ask(client, request)

        return list(await asyncio.gather(*(ask(request) for request in requests)))


async def _ask(client: AsyncClient, request: dict[str, Any]) -> Answer:
    answer = Answer()
    async for event in await client.generate(return_ids=True, **request):
        if isinstance(event, Token | Reasoning):
            answer.text += event.text
            answer.ids += event.ids or ()
            answer.entries += [(entry.logprob, list(entry.top)) for entry in event.logprobs or ()]
        elif isinstance(event, Done):
            answer.finish = event.finish_reason
            answer.steps, answer.drafted = event.spec.steps, event.spec.drafted
            answer.accepted = event.spec.accepted
    return answer
