"""A request's way through the daemon: checked and encoded, submitted, streamed, ended once."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mstar.daemon.admission import check_length, check_request, prompt_ids, sampling_params, text_chars
from mstar.daemon.loading import Model, error_class_of
from mstar.daemon.peer import Peer
from mstar.daemon.protocol import (
    Done,
    FinishReason,
    Generate,
    GenStart,
    ProtocolError,
    Reasoning,
    Token,
    TokenLogprob,
)
from mstar.daemon.registry import LiveRequest, Registry
from mstar.daemon.speculation import SpecCounts
from mstar.daemon.text import EmitterOutput, TextError
from mstar.ranks import messages
from mstar.ranks.messages import TokenRun

log = logging.getLogger("mstar.generate")

# Shorter text is encoded at once (under 2 ms); a thread's round trip would cost more than it saves.
_INLINE_CHARS = 4096
# Longer text, which may take seconds, waits for a thread of its own: shorter text has the others to itself.
_LONG_CHARS = 1 << 18
_SEED_BITS = 63


class Generations:
    """All live generations of the model in force.

    current: the model that serves, or None.
    """

    def __init__(self, registry: Registry, current: Callable[[], Model | None]) -> None:
        self._registry = registry
        self._current = current
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._long_threads = ThreadPoolExecutor(1, thread_name_prefix="long-text")

    def close(self) -> None:
        for threads in (self._threads, self._long_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def start(self, request: Generate, peer: Peer, model: Model) -> None:
        """Makes the request live and submits it, from a thread's result where its text is long.

        Raises ProtocolError for one that cannot become live; later errors end it.
        """
        check_request(request, model)
        live = self._registry.add(request, peer, time.monotonic())
        if request.deadline_ms is not None:
            loop = asyncio.get_running_loop()
            live.deadline = loop.call_later(request.deadline_ms / 1e3, self._deadline, live)
        chars = text_chars(request)
        if chars <= _INLINE_CHARS:
            try:
                self._submit(live, model, prompt_ids(request, model.text))
            except Exception as error:
                self._fail(live, error)
        else:
            threads = self._threads if chars <= _LONG_CHARS else self._long_threads
            live.preparing = asyncio.get_running_loop().create_task(self._prepare(live, model, threads))

    def abort(self, live: LiveRequest) -> None:
        """Ends the request with `done` (abort): what was held back is sent, the engine forgets it."""
        if live.ended:
            return
        if live.emitter is not None:
            self._emit(live, live.emitter.push((), None, True))
        self._finish(live, "abort", tell_engine=True)

    def fail(self, live: LiveRequest, error: ProtocolError) -> None:
        """Ends the request with an error; the engine forgets it."""
        event = error.event()
        event.id, event.attempt_id = live.key
        self._registry.end(live, event)
        self._forget(live)

    def on_event(self, event: messages.Event) -> None:
        """Takes what the engine says about requests; what it says of ended ones is ignored."""
        if isinstance(event, messages.Tokens):
            for run in event.runs:
                live = self._registry.by_id(run.request_id)
                if live is not None:
                    try:
                        self._take(live, run, event.at)
                    except Exception as error:
                        self._fail(live, error)
        elif isinstance(event, messages.Started):
            live = self._registry.by_id(event.request_id)
            if live is not None and live.started_at is None:  # a preempted one starts again, unseen
                self._started(live, event)
        elif isinstance(event, messages.Refused):
            live = self._registry.by_id(event.request_id)
            if live is not None:
                live.submitted = False  # the engine has forgotten it
                self.fail(live, ProtocolError(error_class_of(event.error_class), event.message))

    # Before the engine

    async def _prepare(self, live: LiveRequest, model: Model, threads: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        try:
            ids = await loop.run_in_executor(threads, prompt_ids, live.request, model.text)
            live.preparing = None
            if live.ended:
                return
            if self._current() is not model:
                raise ProtocolError("no_model", "the model was unloaded meanwhile")
            self._submit(live, model, ids)
        except Exception as error:
            live.preparing = None
            self._fail(live, error)

    def _submit(self, live: LiveRequest, model: Model, ids: list[int]) -> None:
        request, text = live.request, model.text
        check_length(request, len(ids), model)
        live.prompt_tokens = len(ids)
        live.starts_in_think = text.starts_in_think(ids)
        live.seed = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed
        live.spec = SpecCounts.of(request.spec, model.loaded.spec)
        sampling = sampling_params(request, model, len(ids), live.seed, live.starts_in_think)
        live.emitter = text.emitter(
            stop=request.stop,
            in_think=live.starts_in_think,
            return_ids=request.return_ids,
            stop_ids=(*sampling.stop_ids, *sampling.eos_ids),
            min_tokens=sampling.min_tokens,
        )
        if not model.mesh.send(messages.Submit(live.request_id, ids, sampling)):
            raise ProtocolError("overloaded", "the engine's queue is full: try again later")
        live.submitted = True

    # From the engine

    def _started(self, live: LiveRequest, event: messages.Started) -> None:
        live.started_at = event.at
        live.cached_tokens = event.cached_tokens
        id, attempt_id = live.key
        live.peer.send(
            GenStart(id, attempt_id, live.prompt_tokens, event.cached_tokens, live.starts_in_think, live.seed)
        )

    def _take(self, live: LiveRequest, run: TokenRun, at: float) -> None:
        emitter = live.emitter
        assert emitter is not None
        if run.ids:
            if live.first_token_at is None:
                live.first_token_at = at
            live.last_token_at = at
        finish, logprobs = run.finish, run.logprobs
        if logprobs is not None:
            logprobs = [TokenLogprob(id, *entry) for id, entry in zip(run.ids, logprobs, strict=True)]
        before = emitter.completion_tokens
        output = emitter.push(run.ids, logprobs, finish is not None)
        # A stop string that ends inside the run cuts it: what comes after is in no count.
        live.spec.take(run, output.completion_tokens - before)
        if output.pieces:
            self._emit(live, output)
        if output.stopped:
            self._finish(live, "stop", tell_engine=finish is None)
        elif finish is not None:
            self._finish(live, "length" if finish == "length" else "stop", tell_engine=False)

    def _emit(self, live: LiveRequest, output: EmitterOutput) -> None:
        request, peer = live.request, live.peer
        for piece in output.pieces:
            kind = Token if piece.kind == "token" else Reasoning
            peer.send(kind(request.id, request.attempt_id, piece.text, piece.ids, piece.logprobs))

    def _finish(self, live: LiveRequest, reason: FinishReason, *, tell_engine: bool) -> None:
        id, attempt_id = live.key
        emitter = live.emitter
        done = Done(
            id=id,
            attempt_id=attempt_id,
            finish_reason=reason,
            usage=live.usage(),
            open_think=emitter.open_think if emitter is not None else False,
            timings=live.timings(),
            spec=live.spec.report(),
        )
        self._registry.end(live, done)
        if tell_engine:
            self._forget(live)

    def _forget(self, live: LiveRequest) -> None:
        model = self._current()
        if live.submitted and model is not None:
            model.mesh.send(messages.Abort(live.request_id))

    def _deadline(self, live: LiveRequest) -> None:
        message = f"not done within deadline_ms ({live.request.deadline_ms})"
        self.fail(live, ProtocolError("deadline", message, field="deadline_ms"))

    def _fail(self, live: LiveRequest, error: Exception) -> None:
        if isinstance(error, TextError):
            error = ProtocolError(error_class_of(error.error_class), error.message, error.field)
        elif not isinstance(error, ProtocolError):
            log.error("request %r failed", live.key, exc_info=error)
            error = ProtocolError("internal", f"a fault of the daemon: {type(error).__name__}: {error}")
        self.fail(live, error)
