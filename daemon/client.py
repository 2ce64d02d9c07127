"""Clients of the daemon: `AsyncClient` for an event loop, `Client` for plain code.

Both speak ZeroMQ through one core, which routes events, keeps the lease and notices a daemon that
is gone; `Client` runs it on a thread of its own. Requests' fields are those of docs/protocol.md.

    with Client() as client:
        client.load("builtin:tiny")
        for event in client.generate(prompt="Once upon a time"):
            if isinstance(event, Token):
                print(event.text, end="")
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from mstar.daemon.client_core import Core, DaemonError, NoDaemon, Stream
from mstar.daemon.protocol import (
    Done,
    Event,
    GenStart,
    Loaded,
    LoadProgress,
    Pong,
    Reasoning,
    ResetDone,
    ShuttingDown,
    StatsEvent,
    StatusEvent,
    Token,
    Unloaded,
)

__all__ = [
    "DEFAULT_ADDRESS", "Answer", "AsyncClient", "AsyncGeneration", "Client", "DaemonError", "Generation",
    "NoDaemon",
]  # fmt: skip

DEFAULT_ADDRESS = "tcp://127.0.0.1:5570"
CONNECT_S = 3.0
TRACE_S = 120.0  # a rank gives a profile up after 60 s without enough steps
ANSWER_S = 60.0  # an unload waits for its ranks to end, which takes 10 s at worst
T = TypeVar("T")
GenerationEvent = GenStart | Token | Reasoning | Done
Messages = str | list[dict[str, Any]]
OnProgress = Callable[[LoadProgress], object]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. text: without thinking; done: finish reason, usage and timings."""

    text: str
    reasoning: str
    done: Done

    @classmethod
    def of(cls, events: Iterable[GenerationEvent]) -> Answer:
        events = list(events)
        text = "".join(e.text for e in events if isinstance(e, Token))
        reasoning = "".join(e.text for e in events if isinstance(e, Reasoning))
        return cls(text, reasoning, cast(Done, events[-1]))


class AsyncGeneration:
    """The events of one `generate`: iterate it. Raises DaemonError for an `error`, NoDaemon when it is lost.

    Leaving the loop early does not end the request: `abort` does, and so does dropping the object.
    """

    def __init__(self, core: Core, stream: Stream) -> None:
        self.id: str | int = stream.key[0]
        self.attempt_id: int = cast(int, stream.key[1])
        self._core = core
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._ready: list[Event] = []

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationEvent:
        if not self._ready:
            self._ready = (await self._stream.take())[::-1]
        if not self._ready:
            raise StopAsyncIteration
        return cast(GenerationEvent, self._ready.pop())

    async def abort(self) -> None:
        """Asks for the end; the last event (`done`, reason `abort`) still comes."""
        _abort_unfinished(self._core, self._stream)

    def __del__(self) -> None:
        if not self._stream.finished and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_abort_unfinished, self._core, self._stream)


class AsyncClient:
    """A connection to the daemon, for use on one event loop.

    address: the daemon's `--bind`. timeout_s: how long the connect check waits. Every method raises
    DaemonError for an `error` event and NoDaemon when nothing answers.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, timeout_s: float = CONNECT_S) -> None:
        self._core = Core(address, timeout_s)

    async def load(self, model: str, on_progress: OnProgress | None = None, **fields: Any) -> Loaded:
        """Loads a model and waits until it serves; on_progress sees every `load_progress`."""
        stream = await self._core.open(self._core.request("load", {"model": model, **fields}))
        while True:
            for event in await stream.take():
                if isinstance(event, Loaded):
                    return event
                if on_progress is not None:
                    on_progress(cast(LoadProgress, event))

    async def generate(self, **fields: Any) -> AsyncGeneration:
        """Starts an answer to `prompt`, `messages` or `prompt_ids`; makes an `id` where none is given."""
        request = self._core.request("generate", {"attempt_id": 0, **fields})
        return AsyncGeneration(self._core, await self._core.open(request))

    async def chat(self, messages: Messages, **fields: Any) -> Answer:
        """The whole answer to a conversation, or to one user message."""
        generation = await self.generate(messages=_conversation(messages), **fields)
        try:
            return Answer.of([event async for event in generation])
        except asyncio.CancelledError:
            await generation.abort()
            raise

    async def abort(self, id: str | int, attempt_id: int = 0) -> None:
        """Ends a request of any client; what the daemon does not know it ignores."""
        self._core.request("abort", {"id": id, "attempt_id": attempt_id})
        await self.ping()  # connects; and an abort before a connection would be lost
        self._core.abort(id, attempt_id)
        await self.ping()  # messages are taken in order: the abort was

    async def status(self) -> StatusEvent:
        """What is loaded and how its ranks are."""
        return cast(StatusEvent, await self._ask("status"))

    async def stats(self, trace_steps: int = 0) -> StatsEvent:
        """The counters since load; with `trace_steps`, once so many further steps were profiled into a file."""
        request = self._core.request("stats", {"trace_steps": trace_steps} if trace_steps else {})
        return cast(StatsEvent, await self._core.ask(request, TRACE_S if trace_steps else ANSWER_S))

    async def unload(self) -> Unloaded:
        """Ends the load and waits until its ranks are gone."""
        return cast(Unloaded, await self._ask("unload"))

    async def reset(self) -> ResetDone:
        """Drops cached prefixes."""
        return cast(ResetDone, await self._ask("reset"))

    async def ping(self) -> Pong:
        """Renews the lease."""
        return cast(Pong, await self._ask("ping"))

    async def shutdown(self) -> ShuttingDown:
        """Ends the daemon."""
        return cast(ShuttingDown, await self._ask("shutdown"))

    async def close(self) -> None:
        """Aborts this client's live requests and disconnects."""
        await self._core.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, kind: str) -> Event:
        return await self._core.ask(self._core.request(kind, {}), ANSWER_S)


class Generation:
    """The events of one `generate`, for plain code; see AsyncGeneration."""

    def __init__(self, generation: AsyncGeneration, thread: _LoopThread) -> None:
        self.id = generation.id
        self.attempt_id = generation.attempt_id
        self._generation = generation
        self._thread = thread
        self._ready: list[GenerationEvent] = []

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GenerationEvent:
        # one hop between threads fetches all that has arrived, not one event
        if not self._ready:
            self._ready = self._thread.run(_fetch(self._generation))[::-1]
        if not self._ready:
            raise StopIteration
        return self._ready.pop()

    def abort(self) -> None:
        """Asks for the end; the last event (`done`, reason `abort`) still comes."""
        self._thread.run(self._generation.abort())


class Client:
    """AsyncClient for plain code: the same methods, blocking; may be used from several threads."""

    def __init__(self, address: str = DEFAULT_ADDRESS, timeout_s: float = CONNECT_S) -> None:
        self._thread = _LoopThread()
        self._client = self._thread.run(_make(address, timeout_s))
        self._closer = weakref.finalize(self, _close, self._thread, self._client)

    def load(self, model: str, on_progress: OnProgress | None = None, **fields: Any) -> Loaded:
        """Loads a model and waits until it serves; on_progress is called on the client's thread."""
        return self._thread.run(self._client.load(model, on_progress, **fields))

    def generate(self, **fields: Any) -> Generation:
        """Starts an answer to `prompt`, `messages` or `prompt_ids`; makes an `id` where none is given."""
        return Generation(self._thread.run(self._client.generate(**fields)), self._thread)

    def chat(self, messages: Messages, **fields: Any) -> Answer:
        """The whole answer to a conversation, or to one user message."""
        return self._thread.run(self._client.chat(messages, **fields))

    def abort(self, id: str | int, attempt_id: int = 0) -> None:
        """Ends a request of any client; what the daemon does not know it ignores."""
        self._thread.run(self._client.abort(id, attempt_id))

    def status(self) -> StatusEvent:
        """What is loaded and how its ranks are."""
        return self._thread.run(self._client.status())

    def stats(self, trace_steps: int = 0) -> StatsEvent:
        """The counters since load; with `trace_steps`, once so many further steps were profiled into a file."""
        return self._thread.run(self._client.stats(trace_steps))

    def unload(self) -> Unloaded:
        """Ends the load and waits until its ranks are gone."""
        return self._thread.run(self._client.unload())

    def reset(self) -> ResetDone:
        """Drops cached prefixes."""
        return self._thread.run(self._client.reset())

    def ping(self) -> Pong:
        """Renews the lease."""
        return self._thread.run(self._client.ping())

    def shutdown(self) -> ShuttingDown:
        """Ends the daemon."""
        return self._thread.run(self._client.shutdown())

    def close(self) -> None:
        """Aborts this client's live requests and disconnects."""
        self._closer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run_forever, args=(self.loop,), name="mstar-client", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        if self.loop.is_closed():
            work.close()
            raise NoDaemon("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def _close(thread: _LoopThread, client: AsyncClient) -> None:
    with contextlib.suppress(NoDaemon):
        thread.run(client.close())
        thread.stop()


def _abort_unfinished(core: Core, stream: Stream) -> None:
    if not stream.finished:
        id, attempt_id = stream.key
        with contextlib.suppress(NoDaemon):
            core.abort(id, cast(int, attempt_id))


async def _make(address: str, timeout_s: float) -> AsyncClient:
    return AsyncClient(address, timeout_s)


async def _fetch(generation: AsyncGeneration) -> list[GenerationEvent]:
    return cast(list[GenerationEvent], await generation._stream.take())


def _conversation(messages: Messages) -> list[dict[str, Any]]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
