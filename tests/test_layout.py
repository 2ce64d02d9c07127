"""The rules of the layout: who may import whom, and how large a file may get."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("daemon", "ranks", "loader", "arch", "kernels", "scripts")
MOST_LINES = 450

# What each folder may import of the others, as prefixes below `mstar`; itself always.
MAY_IMPORT = {
    "daemon": ("ranks.messages", "loader"),
    "ranks": ("loader", "arch", "kernels"),
    "loader": ("arch",),
    "arch": ("kernels", "loader.config"),
    "kernels": (),
    "scripts": FOLDERS,
}
# Commands take options, and time what models serve: they may import these too, and nothing imports them.
COMMANDS = {
    "kernels/aot.py": ("click",),
    "kernels/promote.py": ("click",),
    "kernels/attention/gpu/measure.py": ("click",),
    "kernels/gdn/gpu/measure.py": ("click",),
    "kernels/gdn/gpu/measure_prefill.py": ("click",),
    "kernels/vocab/gpu/measure.py": ("click",),
    "kernels/bench/__main__.py": ("click", "mstar.loader", "mstar.scripts.make_checkpoint"),
}
# The environment that users of this ecosystem expect; a program of ours has no other switches there.
ENVIRONMENT = {"TRITON_INTERPRET", "HF_HOME", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "NO_COLOR"}
STARTS_WITHOUT_TORCH = (
    "mstar.daemon.cli",
    "mstar.daemon.client_cli",
    "mstar.daemon.client",
    "mstar.ranks.messages",
)


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, names of `from` imports appended, whether at its top or inside a function."""
    package = ("mstar", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            yield from (f"{base}{node.module or ''}.{alias.name}" for alias in node.names)


def extra(path: Path) -> tuple[str, ...]:
    """What a command may import beside what its folder may."""
    return COMMANDS.get(str(path.relative_to(ROOT)), ())


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_only_what_the_layout_lets_them(folder):
    allowed = tuple(f"mstar.{name}." for name in (folder, *MAY_IMPORT[folder]))
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources(folder)
        for module in imports(path)
        if module.startswith("mstar.")
        and not f"{module}.".startswith((*allowed, *(f"{name}." for name in extra(path))))
    ]
    assert wrong == []


def test_kernels_need_torch_and_triton_only():
    allowed = {"torch", "triton", "mstar", *sys.stdlib_module_names}
    wrong = {
        (path.name, module)
        for path in sources("kernels")
        for module in imports(path)
        if module.split(".")[0] not in {*allowed, *extra(path)}
    }
    assert wrong == set()


def test_every_file_has_one_subjects_length():
    files = [path for folder in (*FOLDERS, "tests") for path in sources(folder)]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


@pytest.mark.parametrize("module", STARTS_WITHOUT_TORCH)
def test_daemon_and_client_start_without_torch(module):
    check = f"import sys, {module}; sys.exit(', '.join({{'torch', 'transformers'}} & set(sys.modules)) or 0)"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def test_no_switch_hides_in_the_environment():
    read = {
        (str(path.relative_to(ROOT)), name)
        for folder in FOLDERS
        for path in sources(folder)
        for name in environment_reads(path)
    }
    assert {(path, name) for path, name in read if name not in ENVIRONMENT} == set()


def environment_reads(path: Path) -> Iterator[str]:
    """The variables in `os.environ[...]`, `os.environ.get(...)` and `os.getenv(...)`."""
    for node in ast.walk(ast.parse(path.read_text())):
        name: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            name = node.slice if ast.unparse(node.value) == "os.environ" else None
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
            name = node.args[0]
        if name is not None:
            yield ast.literal_eval(name)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_package_says_what_it_is_and_is_typed(folder):
    assert (ROOT / folder / "py.typed").is_file()
    for init in (ROOT / folder).rglob("__init__.py"):
        has_modules = any(path != init for path in init.parent.glob("*.py"))
        assert ast.get_docstring(ast.parse(init.read_text())) or not has_modules, init
