"""NextTurn: many callbacks in one turn of the event loop, as one of its handles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class NextTurn:
    """Runs callbacks in the loop's next turn, in the order in which they came.

    A window has news for every slot at once, and a handle of the loop for each would cost as much as what it does.
    """

    def __init__(self, *, rest: float = 0.0, max_rest_s: float = 0.0) -> None:
        """rest: times as much as the last turn's callbacks took of the processor must pass before those of the next
        begin, but never more than max_rest_s; the loop's timer counts milliseconds, and less than half a one is none.
        """
        self._due: list[Callable[[], object]] = []
        self._rest = rest
        self._max_rest_s = max_rest_s
        self._not_before_s = 0.0
        self.began_s = time.monotonic()
        """When the callbacks that run now, or ran last, began."""

    def call(self, callback: Callable[[], object]) -> None:
        """Have it run once, soon; from a callback: not in the same turn."""
        if not self._due:
            self._plan()
        self._due.append(callback)

    def _plan(self) -> None:
        loop = asyncio.get_running_loop()
        wait_s = self._not_before_s - time.monotonic() if self._rest else 0.0
        if wait_s > 0.0:
            loop.call_later(wait_s, self._run)
        else:
            loop.call_soon(self._run)

    def _run(self) -> None:
        due, self._due = self._due, []
        self.began_s = time.monotonic()
        began_cpu_s = time.thread_time() if self._rest else 0.0
        for callback in due:
            try:
                callback()
            except Exception as error:  # what the loop does with those of its own handles
                context = {"message": f"a callback failed: {callback!r}", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)
        if self._rest:
            took_s = time.thread_time() - began_cpu_s
            rest_s = min(self._rest * took_s, self._max_rest_s)
            self._not_before_s = time.monotonic() + rest_s
