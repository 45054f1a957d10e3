from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from engine.fake import FakeScript
from tests.conformance.live import live_server

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.conformance.live import Live


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live() -> AsyncGenerator[Live]:
    """One server for a whole module; the tests must run on the module's loop."""
    async with live_server(FakeScript()) as server:
        yield server
