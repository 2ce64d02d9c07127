"""A load's private directory of ipc sockets, and the removal of those that a killed daemon left."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "mstar-"


def create_run_dir() -> Path:
    """A new directory of mode 0700, named after this process so that a later daemon can tell it is stale."""
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_root()))


def remove_run_dir(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def sweep_run_dirs() -> list[Path]:
    """Removes the directories of this user's daemons that no longer run; returns them."""
    removed = []
    for path in Path(_root()).glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).split("-")[0]
        try:
            stale = pid.isdigit() and path.lstat().st_uid == os.getuid() and not _alive(int(pid))
        except FileNotFoundError:
            continue
        if stale and path.is_dir() and not path.is_symlink():
            remove_run_dir(path)
            removed.append(path)
    return removed


def _root() -> str:
    # A socket's path must stay under 104 bytes; a long TMPDIR would leave no room for its name.
    root = tempfile.gettempdir()
    return root if len(root) <= 50 else "/tmp"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
