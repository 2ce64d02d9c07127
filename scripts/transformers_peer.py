"""The benchmark's yardstick: the same requests through `transformers` generate, in a process of its own.

Run as `python -m mstar.scripts.transformers_peer DIRECTORY`; jobs come as JSON lines on stdin and answers
go as JSON lines to stdout. A job is {"dtype", "threads", "batch", "output_tokens", "prompts"} and is
answered by {"batches": [{"sent", "arrivals", "ended"}]}, times in seconds of one monotonic clock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar.scripts.serving_load import BenchError, Run, Trace


@dataclass(frozen=True, slots=True)
class Cell:
    """How `transformers` is run: bf16 and fp32, with each thread count, and the best one counts."""

    dtype: str
    threads: int

    @property
    def name(self) -> str:
        return f"transformers {self.dtype} {self.threads}t"


class TransformersPeer:
    """The parent's side: one fresh process that serves the jobs of every cell."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-m", "mstar.scripts.transformers_peer", str(directory)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, cell: Cell, prompts: Sequence[list[int]], output_tokens: int, batch: int) -> Run:
        """Serves the prompts in batches of `batch`, one after another. Raises BenchError if the process dies."""
        job = {
            "dtype": cell.dtype,
            "threads": cell.threads,
            "batch": batch,
            "output_tokens": output_tokens,
            "prompts": list(prompts),
        }
        if self._process.stdin is None or self._process.stdout is None:
            raise BenchError("the transformers process has no pipes")
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise BenchError("the transformers process is gone") from None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"the transformers process ended with {self._process.wait()}")
        traces = []
        for served in json.loads(line)["batches"]:
            for _ in range(served["requests"]):
                arrivals = [(at, 1) for at in served["arrivals"]]
                traces.append(Trace(served["sent"], arrivals, served["ended"]))
        return Run(traces)

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _serve(directory: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    models: dict[str, Any] = {}
    for line in sys.stdin:
        job = json.loads(line)
        if job["dtype"] not in models:
            models[job["dtype"]] = _load(directory, job["dtype"])
        answers.write(json.dumps({"batches": _generate(models[job["dtype"]], job)}) + "\n")
        answers.flush()


def _load(directory: str, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=kind, local_files_only=True)
    model.eval()
    model.generation_config.eos_token_id = None  # ignore_eos
    model.generation_config.pad_token_id = 0
    return model


def _generate(model: Any, job: dict[str, Any]) -> list[dict[str, Any]]:
    import torch
    from transformers import StoppingCriteriaList

    torch.set_num_threads(job["threads"])
    served = []
    prompts, batch = job["prompts"], job["batch"]
    for first in range(0, len(prompts), batch):
        chunk = prompts[first : first + batch]
        arrivals: list[float] = []

        def tick(ids: torch.Tensor, scores: Any, arrivals: list[float] = arrivals, **_: Any) -> torch.Tensor:
            """Called after every step with its tokens chosen; notes when, and never stops."""
            arrivals.append(time.perf_counter())
            return torch.zeros(ids.shape[0], dtype=torch.bool)

        sent = time.perf_counter()
        ids = torch.tensor(chunk)
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=job["output_tokens"],
                do_sample=False,
                stopping_criteria=StoppingCriteriaList([tick]),
            )
        ended = time.perf_counter()
        if out.shape[1] - ids.shape[1] != job["output_tokens"] or len(arrivals) != job["output_tokens"]:
            raise RuntimeError(f"{tuple(out.shape)}, {len(arrivals)} steps for {job['output_tokens']} tokens")
        served.append({"sent": sent, "arrivals": arrivals, "ended": ended, "requests": len(chunk)})
    return served


if __name__ == "__main__":
    _serve(sys.argv[1])
