"""Compiles candidates into Triton's cache in several processes: one takes about a second, and there are hundreds."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context

from mstar.kernels.registry import GemmKey, KernelChoice

log = logging.getLogger(__name__)

Job = tuple[GemmKey, KernelChoice]
BEGUN_S = 60.0  # for jobs that run when the time is up: they use the GPU, which what is timed next would show

# A process whose context is lost fails at everything after: only its first failure says something.
_lost = False


def fatal(error: Exception) -> bool:
    """Whether an error leaves the process's CUDA context unusable."""
    text = str(error).lower()
    return any(
        word in text for word in ("illegal memory", "illegal instruction", "misaligned", "unspecified launch")
    )


class CompilePool:
    """`failures` says of each job that failed why."""

    def __init__(self, workers: int):
        # the parent has a CUDA context, which a fork would break
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
        self.failures: dict[Job, str] = {}

    def compile(self, jobs: list[Job], seconds: float, known_tiles: tuple[int, ...] | None = None) -> None:
        """Runs each job once, as far as that many seconds allow; returns when none runs any more.

        None at all in no time.

        known_tiles: run them as a step does, see `run_once`.
        """
        if seconds <= 0:
            return
        end = time.monotonic() + seconds
        try:
            futures: dict[Future[str], Job] = {
                self._pool.submit(run_once, *job, known_tiles): job for job in jobs
            }
        except BrokenProcessPool:  # from now on candidates are compiled where they are measured
            return
        done, missed = wait(futures, timeout=max(0.0, end - time.monotonic()))
        begun = [future for future in missed if not future.cancel()]  # or on their way to a process
        late, still = wait(begun, timeout=BEGUN_S)
        if still:
            log.warning("%d candidates are still being compiled: what is timed now may be slower", len(still))
        for future in done | late:
            broken = future.exception()  # a process that died
            if broken is None and future.result():
                self.failures[futures[future]] = future.result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def run_once(key: GemmKey, choice: KernelChoice, known_tiles: tuple[int, ...] | None = None) -> str:
    """Calls on whatever is in memory; why one failed, or nothing.

    known_tiles: None, or call it as a step does, which knows what is read next and in how many tiles the squares of
    a row are, one of these; a residual's are counted.
    """
    global _lost
    if _lost:
        return ""
    import torch

    from mstar.kernels.bench.parity import TORCH_DTYPES, make_inputs
    from mstar.kernels.linear.gpu.ahead import Ahead
    from mstar.kernels.linear.gpu.run import Prepared, run_linear, run_residual

    device = torch.device("cuda")
    try:
        inputs = make_inputs(key, device, torch.Generator(device))
        weight = torch.empty(key.weight_shape, dtype=TORCH_DTYPES[key.dtype], device=device)
        if known_tiles is None:
            inputs.run(run_linear, choice, weight)
        elif inputs.residual is not None:
            for norm in (None, torch.ones(key.n, device=device)):
                ahead = Ahead(weight, norm=norm, eps=1e-6)
                run_residual(choice, inputs.x, weight, inputs.residual, ahead, scaled=norm is not None)
        else:
            prepared: list[Prepared | None] = [None]
            if key.kind in ("norm", "gated"):
                prepared.append(Prepared(multiplier=inputs.norm, normed=inputs.x))
                if choice.kernel != "fma":
                    prepared += [
                        Prepared(torch.ones(tiles, key.rows, device=device), inputs.x, inputs.norm)
                        for tiles in known_tiles
                    ]
            for known in prepared:
                inputs.run(partial(run_linear, known=known, ahead=Ahead(weight)), choice, weight)
        torch.cuda.synchronize()
    except Exception as error:  # of any kind: the bench records it
        if isinstance(error, torch.OutOfMemoryError):  # of the neighbours' making: it is tried again alone
            return ""
        _lost = fatal(error)
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return ""
