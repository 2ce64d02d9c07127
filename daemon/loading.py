"""The daemon's one model: empty, loading, ready or failed, and the ways between.

What can be refused is refused before a process is started: config, tp, weights' names and
shapes, speculation. A refused load leaves everything as it was; one whose ranks fail leaves
the state `failed`, with the reason, until the next load.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from mstar.daemon.protocol import (
    ErrorClass,
    KvReport,
    Load,
    Loaded,
    LoadedSpec,
    LoadProgress,
    LoadSpecFields,
    ProtocolError,
    State,
)
from mstar.daemon.settings import Settings
from mstar.daemon.supervisor import Mesh, MeshFailure, RankState
from mstar.daemon.text import TextError, TextModel, load_text
from mstar.daemon.threads import in_thread
from mstar.loader import (
    LoadError,
    ModelConfig,
    SpecPolicy,
    check_built,
    check_tp,
    decide,
    fingerprint,
    head_fault,
    read_config,
    read_manifest,
    resolve,
    resolve_dtype,
)
from mstar.ranks import messages

log = logging.getLogger("mstar.load")

_MAX_SEQ_DEFAULT = 65_536
_PROGRESS_INTERVAL_S = 0.05
_ERROR_CLASSES = frozenset(get_args(ErrorClass))


@dataclass(frozen=True, slots=True)
class Model:
    """A model that serves."""

    text: TextModel
    mesh: Mesh
    config: ModelConfig
    max_seq: int
    loaded: Loaded


@dataclass(frozen=True, slots=True)
class _Checked:
    """A load that nothing speaks against, before any process is started."""

    directory: Path
    config: ModelConfig
    arch: str
    tp: int
    dtype: str
    max_seq: int
    max_num_seqs: int
    memory_fraction: float
    policy: SpecPolicy
    fingerprint: str


class ModelHost:
    """Loads and unloads. Methods raise ProtocolError.

    on_engine_event: what the engine says about requests. on_lost: the ranks of a model that
    served are gone; `model` is None by then.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        on_engine_event: Callable[[messages.Event], None],
        on_lost: Callable[[ProtocolError], None],
        rank_command: Sequence[str] | None = None,
    ) -> None:
        self.state: State = "empty"
        self.reason: str | None = None  # of `failed`
        self.model: Model | None = None
        self._settings = settings
        self._on_engine_event = on_engine_event
        self._on_lost = on_lost
        self._rank_command = rank_command
        self._mesh: Mesh | None = None  # of a load under way too
        self._unloading = False

    @property
    def ranks(self) -> list[RankState]:
        """The ranks that are there, of a load under way too."""
        return self._mesh.ranks if self._mesh is not None and self.state in ("loading", "ready") else []

    @property
    def device(self) -> str:
        """What a load's ranks will run on."""
        return self._settings.platform

    def check_can_load(self) -> None:
        """Raises `busy` while there is a model, or one on its way."""
        if self.state == "loading":
            raise ProtocolError("busy", "a load is under way: wait for its end")
        if self._unloading:
            raise ProtocolError("busy", "the model is being unloaded: try again soon", retryable=True)
        if self.model is not None:
            raise ProtocolError("busy", f"{self.model.loaded.model} is loaded: unload it first")

    def begin_load(
        self, request: Load, on_progress: Callable[[LoadProgress], None]
    ) -> Coroutine[Any, Any, Loaded]:
        """The state is `loading` from now on; await the result, which checks, spawns and waits."""
        self.check_can_load()
        before = self.state, self.reason
        self.state, self.reason = "loading", None
        return self._load(request, on_progress, before)

    def begin_unload(self, *, hurry: bool = False) -> Coroutine[Any, Any, None]:
        """There is no model from now on; await the result, which ends the ranks.

        In order, or at once with `hurry`. Raises `no_model` where there is none.
        """
        if self.state == "loading":
            raise ProtocolError("busy", "a load is under way: wait for its end", retryable=True)
        if self._unloading or (self.model is None and self.state != "failed"):
            raise ProtocolError("no_model", "no model is loaded")
        self._unloading = True
        self.model = None
        return self._unload(hurry)

    async def kill(self) -> None:
        """Ends the ranks at once, whatever the state."""
        if self._mesh is not None:
            await self._mesh.kill()

    async def _load(
        self, request: Load, on_progress: Callable[[LoadProgress], None], before: tuple[State, str | None]
    ) -> Loaded:
        began = time.monotonic()
        try:
            try:
                checked = await in_thread(_check, request, self._settings)
            except (ProtocolError, LoadError, OSError) as error:
                self.state, self.reason = before
                raise _as_protocol_error(error) from error
            if self._mesh is not None:
                await self._mesh.wait_ended()  # of a mesh that failed: its memory must be free
            self.model = await self._start(request, checked, on_progress, began)
            self.state = "ready"
            return self.model.loaded
        except BaseException as error:
            if self.state == "loading":
                # A tokenizer's fault is the directory's, like those that are found before a rank is started.
                refused = isinstance(error.__cause__, TextError)
                self.state, self.reason = (
                    before if refused else ("failed", str(error) or "the load was given up")
                )
            raise

    async def _unload(self, hurry: bool) -> None:
        try:
            if self._mesh is not None:
                await (self._mesh.kill() if hurry else self._mesh.stop())
            self._mesh = None
            self.state, self.reason = "empty", None
        finally:
            self._unloading = False

    async def _start(
        self,
        request: Load,
        checked: _Checked,
        on_progress: Callable[[LoadProgress], None],
        began: float,
    ) -> Model:
        settings = self._settings
        spec = messages.LoadSpec(
            model_dir=str(checked.directory),
            tp_size=checked.tp,
            device="cpu" if settings.platform == "cpu" else "cuda",
            dtype=checked.dtype,
            max_seq=checked.max_seq,
            max_num_seqs=checked.max_num_seqs,
            memory_fraction=checked.memory_fraction,
            overrides=request.overrides,
            threads=settings.rank_threads(checked.tp),
            run_dir="",  # the mesh makes it
            heartbeat_s=settings.heartbeat_s,
            spec_k=checked.policy.k,
            spec_fixed=settings.mtp_fixed,
            eager=settings.eager,
        )
        progress = _Progress(request.id, on_progress)

        def on_event(event: messages.Event) -> None:
            if isinstance(event, messages.Progress):
                progress.take(event)
            else:
                self._on_engine_event(event)

        mesh = Mesh(
            spec,
            on_event=on_event,
            on_failure=self._mesh_failed,
            command=self._rank_command,
            heartbeat_lost_s=settings.heartbeat_lost_s,
        )
        self._mesh = mesh
        # The tokenizer's import costs a second of its own: while the ranks read.
        text_task = asyncio.create_task(in_thread(_load_text, checked.directory))
        start_task = asyncio.create_task(mesh.start())
        try:
            text = await text_task
            ready = await start_task
            if mesh.failure is not None:  # ready, and lost while the tokenizer was being read
                raise mesh.failure
        except BaseException as error:
            start_task.cancel()
            await asyncio.gather(start_task, return_exceptions=True)
            await mesh.kill()
            if isinstance(error, MeshFailure | TextError):
                raise _as_protocol_error(error) from error
            raise
        for note in ready.notes:
            log.info("%s", note)
        policy = checked.policy
        if policy.mtp:
            log.info("speculation: %d drafts a step, by a head in %s", policy.k, policy.draft_head)
        else:
            log.info("no speculation: %s", policy.reason)
        loaded = _report(request, checked, ready, began)
        return Model(text, mesh, checked.config, checked.max_seq, loaded)

    def _mesh_failed(self, failure: MeshFailure) -> None:
        if self.model is None:  # being unloaded: what matters ended before
            return
        self.model = None
        self.state, self.reason = "failed", failure.message
        self._on_lost(_as_protocol_error(failure))


class _Progress:
    """Sums the ranks' progress, and tells it a few times a second."""

    def __init__(self, load_id: str | int | None, tell: Callable[[LoadProgress], None]) -> None:
        self._id = load_id
        self._tell = tell
        self._stage = ""
        self._ranks: dict[int, tuple[int, int]] = {}
        self._told_at = 0.0

    def take(self, event: messages.Progress) -> None:
        if event.stage != self._stage:
            self._stage, self._ranks = event.stage, {}
        self._ranks[event.rank] = (event.done, event.total)
        now = time.monotonic()
        if now - self._told_at < _PROGRESS_INTERVAL_S and event.done < event.total:
            return
        self._told_at = now
        done, total = (sum(part) for part in zip(*self._ranks.values(), strict=True))
        stage = event.stage
        self._tell(LoadProgress(stage=stage, done=done, total=total, unit=event.unit, id=self._id))  # type: ignore[arg-type]


def _check(request: Load, settings: Settings) -> _Checked:
    """Everything that can be refused without a process. Reads files and may ask the hub: for a thread."""
    given = request.model_fields_set
    spec = request.spec
    wanted = LoadSpecFields.model_construct(
        mtp=spec.mtp if "mtp" in spec.model_fields_set else settings.mtp,
        mtp_k=spec.mtp_k if "mtp_k" in spec.model_fields_set else settings.mtp_k,
        draft_head=spec.draft_head,
        ngram=spec.ngram,
        dflash=spec.dflash,
        dspark=spec.dspark,
    )
    tp = request.tp or settings.tp
    check_built(wanted)  # before the hub is asked for the model
    directory = resolve(request.model)
    config = read_config(directory, request.overrides)
    check_tp(config, tp)
    dtype = resolve_dtype(request.dtype if "dtype" in given else settings.dtype, config)
    positions = config.max_position_embeddings
    max_seq = request.max_seq or settings.max_seq or min(positions, _MAX_SEQ_DEFAULT)
    if max_seq > positions:
        message = f"max_seq {max_seq} is over the {positions} positions of the model's config"
        raise ProtocolError("validation", message, field="max_seq")
    read_manifest(directory, config)
    policy = decide(wanted, head_fault(directory, config), tp, dtype)
    return _Checked(
        directory=directory,
        config=config,
        arch=_architecture(directory),
        tp=tp,
        dtype=dtype,
        max_seq=max_seq,
        max_num_seqs=request.max_num_seqs if "max_num_seqs" in given else settings.max_num_seqs,
        memory_fraction=request.memory_fraction if "memory_fraction" in given else settings.memory_fraction,
        policy=policy,
        fingerprint=fingerprint(directory),
    )


def _load_text(directory: Path) -> TextModel:
    text = load_text(directory)
    with contextlib.suppress(TextError):
        # A template's first use compiles it: 20 ms that would stop the loop in the first request.
        text.render([{"role": "user", "content": "Hello"}])
    return text


def _architecture(directory: Path) -> str:
    top = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    names = top.get("architectures") or [top.get("model_type", "unknown")]
    return str(names[0])


def _report(request: Load, checked: _Checked, ready: messages.Ready, began: float) -> Loaded:
    config, policy = checked.config, checked.policy
    return Loaded(
        model=request.model,
        fingerprint=checked.fingerprint,
        arch=checked.arch,
        layers=len(config.layer_types),
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        params=ready.params,
        tp=checked.tp,
        device=ready.device,
        dtype=ready.dtype,
        max_seq=checked.max_seq,
        max_num_seqs=checked.max_num_seqs,
        kv=KvReport(ready.dtype, ready.kv_blocks, ready.kv_blocks * ready.block_size),
        spec=LoadedSpec(policy.mtp, policy.k, policy.draft_head, policy.reason),
        load_ms=round((time.monotonic() - began) * 1e3, 1),
        memory=ready.memory,
        notes=ready.notes,
        id=request.id,
    )


def error_class_of(name: str) -> ErrorClass:
    """The protocol's class of that name; `internal` for what is none."""
    return cast(ErrorClass, name) if name in _ERROR_CLASSES else "internal"


def _as_protocol_error(error: Exception) -> ProtocolError:
    if isinstance(error, ProtocolError):
        return error
    if isinstance(error, LoadError | MeshFailure | TextError):
        retryable = True if error.error_class == "rank_lost" else None
        return ProtocolError(error_class_of(error.error_class), error.message, error.field, retryable)
    return ProtocolError("validation", f"the model cannot be read: {error}", field="model")
