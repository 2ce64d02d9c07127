"""Profiles a few steps with torch's profiler, into a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch.autograd.profiler import profile

# A trace whose steps do not come is given up.
ARMED_S = 60.0


class Trace:
    """Armed when made; begins with the next step, and is due after `steps` of them."""

    def __init__(self, path: Path, steps: int, query_id: int) -> None:
        self.path = path
        self.query_id = query_id
        self._left = steps
        self._until = time.monotonic() + ARMED_S
        self._profile: profile | None = None

    def before_step(self) -> bool:
        """Begins with the first one; False where that came too late."""
        if self._profile is None:
            if self.expired:
                return False
            # what torch.profiler is made of: that one imports a compiler at its start, for seconds, in the step loop
            device = "cuda" if torch.cuda.is_available() else None
            self._profile = profile(use_device=device, use_kineto=True)
            self._profile.__enter__()
        return True

    def after_step(self) -> bool:
        """Counts a step; True when it is to be ended."""
        self._left -= 1
        return self._left <= 0 or self.expired

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self._until

    def end(self) -> bool:
        """Writes what there is; False where no step came, or nobody wants it: then the empty file is gone."""
        if self._profile is None:
            return False
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)
        profiled, self._profile = self._profile, None
        if not self.path.exists():
            return False
        profiled.export_chrome_trace(str(self.path))  # in another file's place, which anyone could read
        try:
            self.path.chmod(0o600)
            return self.path.stat().st_size > 0
        except OSError:  # the exporter says in a log that it could not
            return False
