"""What holds for every test: GPU tests are skipped where there is no CUDA device; each starts with denormals on."""

from __future__ import annotations

import gc
import sys

import pytest

from tests.factories import FakeClock


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # only here: most runs need no torch at all

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_runtest_setup() -> None:
    """An engine flushes denormals for its whole thread, which is this one; hypothesis refuses to draw floats then."""
    if "torch" in sys.modules:
        import torch

        torch.set_flush_denormal(False)


@pytest.fixture
def clock() -> FakeClock:
    """Time for the scheduler that passes only when told to."""
    return FakeClock()


def pytest_collection_finish() -> None:
    """Every start walks all live objects for tensors, six times: what imports have made stays, and is left out."""
    gc.collect()
    gc.freeze()
