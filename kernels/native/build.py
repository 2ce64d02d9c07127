"""Compiles the C sources of this folder with the system's compiler, once, and loads them.

The file name in the cache is a hash of everything that the machine code depends on (sources, compiler,
flags, processor), so a stale library is never loaded and ranks that start together agree on one.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

_KERNELS = Path(__file__).resolve().parent.parent
# nothing may reorder or fuse sums behind our back, because equal text at every batch size rests on their order
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-semantic-interposition",
    "-fPIC",
    "-shared",
    "-pthread",
)
_COMPILE_LIMIT_S = 120


@functools.cache
def load_library(name: str) -> ctypes.CDLL | None:
    """Loads `kernels/native/<name>.c` as a library, compiling it if no earlier start did.

    Returns None, after a log line that says why, where there is no C compiler or it fails: callers then
    run their reference or another backend, and the load says so.
    """
    compiler = next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)
    if compiler is None:
        log.warning("no C compiler (cc, gcc or clang) on the PATH: %s does not run, its reference does", name)
        return None
    source = _KERNELS / "native" / f"{name}.c"
    library = _cache_dir() / f"{name}-{_key(compiler)}.so"
    try:
        if not library.exists():
            _compile(compiler, source, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        detail = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        log.warning("%s could not be built or loaded, its reference runs: %s", source, detail)
        return None


def _compile(compiler: str, source: Path, library: Path) -> None:
    # compiled beside its place and moved: a rank that starts at the same time sees all of it or nothing
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [compiler, *_FLAGS, "-o", str(built), str(source), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S)
        os.replace(built, library)


def _cache_dir() -> Path:
    folder = Path.home() / ".cache" / "mstar" / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    folder = Path(tempfile.gettempdir()) / f"mstar-native-{os.getuid()}"
    folder.mkdir(exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise OSError(
            f"{folder} belongs to another user: remove it, or give the home directory a writable .cache"
        )
    return folder


@functools.cache
def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    for path in sorted([*_KERNELS.rglob("*.c"), *_KERNELS.rglob("*.h")]):
        digest.update(path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30).stdout
    digest.update("\n".join((*_FLAGS, version, platform.machine(), _cpu_flags())).encode())
    return digest.hexdigest()[:16]


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
