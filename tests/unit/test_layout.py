"""The import direction of style.md section 2, read off the source: gateway -> scheduler -> {cache, engine}."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gateway", "scheduler", "cache", "engine", "loadtest")

ALLOWED = {
    "gateway": {"gateway", "scheduler"},
    "scheduler": {"scheduler", "cache", "engine"},
    "cache": {"cache"},
    "engine": {"engine"},
    "loadtest": {"loadtest"},
}

# What the scheduler's process may load of the engine: messages, choices and errors.
TORCH_FREE_ENGINE = {
    "command_line",
    "interface",
    "config",
    "errors",
    "fake",
    "flight",
    "grammar",
    "wire",
}

# The HF baseline is a program of its own: it measures torch and transformers, not us.
MAY_IMPORT_TORCH = {"loadtest/hf_baseline.py"}


def source_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Full names of all modules a file imports, wherever in the file, and relative imports resolved."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(path.relative_to(ROOT).parent.parts)
            prefix = base[: len(base) - node.level + 1] if node.level else []
            module = ".".join([*prefix, *([node.module] if node.module else [])])
            modules.add(module)
            modules.update(f"{module}.{alias.name}" for alias in node.names)
    return modules


def first_names(path: Path) -> set[str]:
    return {module.split(".")[0] for module in imported_modules(path)}


ALL_FILES = [path for package in PACKAGES for path in source_files(package)]


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_direction(path: Path) -> None:
    ours = first_names(path) & {*PACKAGES, "tests"}
    allowed = ALLOWED[path.relative_to(ROOT).parts[0]]
    assert ours <= allowed, sorted(ours - allowed)


def is_torch_free(path: Path) -> bool:
    relative = path.relative_to(ROOT)
    if relative.parts[0] == "engine":
        return len(relative.parts) == 2 and path.stem in TORCH_FREE_ENGINE
    return relative.as_posix() not in MAY_IMPORT_TORCH


TORCH_FREE_FILES = [path for path in ALL_FILES if is_torch_free(path)]


@pytest.mark.parametrize("path", TORCH_FREE_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_torch_outside_the_engine_process(path: Path) -> None:
    """Neither at first hand nor through an engine module that imports torch."""
    modules = imported_modules(path)
    assert not {module.split(".")[0] for module in modules} & {"torch", "transformers", "triton"}
    engine_modules = {module.split(".")[1] for module in modules if module.startswith("engine.")}
    assert engine_modules <= TORCH_FREE_ENGINE, sorted(engine_modules - TORCH_FREE_ENGINE)


@pytest.mark.parametrize("package", PACKAGES)
def test_init_files_are_empty(package: str) -> None:
    """So that importing an interface or a config never loads torch."""
    for path in (ROOT / package).rglob("__init__.py"):
        assert path.read_text(encoding="utf-8").strip() == "", path.relative_to(ROOT)
