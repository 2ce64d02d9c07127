"""The wheel: all of mstar, nothing else, and commands that run from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("daemon", "ranks", "loader", "arch", "kernels", "scripts")
SHIPPED = (".py", ".c", ".h", ".typed", ".json", ".safetensors", ".jinja", ".md")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    env = {**os.environ, **environment}
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=110
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def shipped_files() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SHIPPED and "__pycache__" not in path.parts:
                yield path.relative_to(ROOT)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the sources, so that the checkout stays clean and two runs do not meet."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, source)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    run(sys.executable, "-c", build, cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-index", "--target", target)
    run(*pip, wheel, cwd=target)
    return target


def test_wheel_contains_every_source_native_code_types_and_the_built_in_model(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert inside == {f"mstar/{path.as_posix()}" for path in shipped_files()}
    assert {"mstar/loader/builtin/tiny/model.safetensors", "mstar/kernels/native/cpu_ops.c"} <= inside


def test_nothing_but_mstar_lands_in_site_packages(installed):
    assert {path.name for path in installed.iterdir() if path.suffix != ".dist-info"} == {"mstar", "bin"}


@pytest.mark.parametrize("command", ["mstar", "mstar-daemon"])
def test_commands_run_from_the_wheel(installed, tmp_path, command):
    assert "Usage" in run(installed / "bin" / command, "--help", cwd=tmp_path, PYTHONPATH=str(installed))


def test_built_in_model_is_found_in_the_wheel(installed, tmp_path):
    check = "from mstar.loader import resolve; print(resolve('builtin:tiny'))"
    found = run(sys.executable, "-c", check, cwd=tmp_path, PYTHONPATH=str(installed)).strip()
    assert Path(found) == installed / "mstar" / "loader" / "builtin" / "tiny"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("name", ["cpu_ops.c", "gumbel.c"])
def test_native_code_in_the_wheel_is_complete(installed, tmp_path, name):
    source = installed / "mstar" / "kernels" / "native" / name
    run("cc", "-std=gnu11", "-march=native", "-fsyntax-only", source, cwd=tmp_path)


def test_every_module_imports_from_the_wheel(installed, tmp_path):
    names = [
        ".".join(("mstar", *path.with_suffix("").parts)) for path in shipped_files() if path.suffix == ".py"
    ]
    modules = [name for name in names if not name.endswith(("__init__", "__main__"))]
    check = (
        "import importlib, sys, mstar.daemon; "
        "[importlib.import_module(name) for name in sys.argv[1:]]; print(mstar.daemon.__file__)"
    )
    found = run(sys.executable, "-c", check, *modules, cwd=tmp_path, PYTHONPATH=str(installed)).strip()
    assert found.startswith(str(installed))
