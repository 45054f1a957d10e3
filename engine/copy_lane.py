"""The lane on which parked state is copied between slots and host, beside the windows.

Copies of one lane run one after the other. Whoever works on a slot first waits for the slot's copies; nobody else has
to. On the CPU a copy is done when `run` returns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class CopyLane:
    """Copies at once, in the caller's thread."""

    def run(self, slot: int, copy: Callable[[], None]) -> None:
        """Issue a copy from or to a slot; it sees the slot as all work issued before left it."""
        copy()

    def wait(self, slot: int) -> None:
        """Work issued from now on comes after the slot's copies."""

    def fence(self) -> Callable[[], None]:
        """A call, from any thread, that returns when everything issued so far is done."""
        return _done


class StreamLane(CopyLane):
    """Copies on a CUDA stream of its own, which the windows' stream meets only at a slot that was copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._events: dict[int, torch.cuda.Event] = {}

    def run(self, slot: int, copy: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
        event = torch.cuda.Event()
        event.record(self._stream)
        self._events[slot] = event

    def wait(self, slot: int) -> None:
        event = self._events.pop(slot, None)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def fence(self) -> Callable[[], None]:
        return self._stream.record_event().synchronize


def lane_for(device: torch.device) -> CopyLane:
    """The lane of a device."""
    return StreamLane(device) if device.type == "cuda" else CopyLane()


def _done() -> None:
    pass
