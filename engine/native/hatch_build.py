"""Build hook: compiles the CPU step when the package is built or installed in place."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if TYPE_CHECKING:
    from types import ModuleType


class CompileStep(BuildHookInterface[Any]):
    """A failure is a warning: without the library the torch layers run, slower, and start-up says so."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """A compiler from the package index where the machine has none."""
        return [] if _build().compiler() else ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; a wheel with the library fits one platform only."""
        build = _build()
        if build.main():
            self.app.display_warning(
                "the compiled CPU step is left out: with a C compiler or the package ziglang the engine is much faster"
            )
            return
        if version != "editable":
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"


def _build() -> ModuleType:
    """build.py beside this file; the package itself is not importable while it is built."""
    spec = importlib.util.spec_from_file_location("build_step", Path(__file__).parent / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
