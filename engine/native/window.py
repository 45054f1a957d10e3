"""A window in one call of the compiled step: see engine.steps.WholeWindow.

Python's part of a window is to write and read a few numbers of each slot, in structures that live as long as the step.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from engine.interface import MAX_SLOTS, WindowTimes
from engine.native import abi
from engine.native.pick import made_ids, made_row
from engine.sampling import PickRow
from engine.state import WINDOW_ROWS
from engine.steps import WindowWork, WindowYield

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.interface import SamplingParams
    from engine.native.pick import NativePicker
    from engine.native.step import NativeStep
    from engine.sampling import TokenHistory

_NEVER_DRAFTS = -1


class NativeWindow:
    """See engine.steps.WholeWindow."""

    def __init__(self, step: NativeStep, picker: NativePicker) -> None:
        assert MAX_SLOTS <= abi.MOST_SLOTS and WINDOW_ROWS <= abi.MOST_ROWS
        ple = step.spec.ple
        self._step = step
        self._num_token_ids = picker.num_token_ids
        self._context = ple.ngram_size - 1 if ple is not None and ple.layer_ids else 0
        self._padding = [ple.eos_id if ple is not None else 0] * abi.RECENT_IDS
        self._seats = (abi.Seat * MAX_SLOTS)()
        # Parts of the seats' memory: looking them up takes as long as writing to them.
        self._asked = [
            (ctypes.c_int64 * (4 + abi.RECENT_IDS)).from_buffer(seat.asked) for seat in self._seats
        ]
        self._found = [
            (ctypes.c_int32 * (4 + abi.MOST_ROWS)).from_buffer(seat.found) for seat in self._seats
        ]
        self._gates: list[Any] = [seat.gate for seat in self._seats]
        self._alive: list[list[Any]] = [[] for _ in self._seats]
        self._ahead: list[WindowWork | None] = [None] * MAX_SLOTS
        """What a slot was drafted for before its window was asked for."""
        self._ahead_s = 0.0
        self._seconds = (ctypes.c_double * 2)()
        self._slots = [(ctypes.c_int32 * count)() for count in range(MAX_SLOTS + 1)]

    @staticmethod
    def why_not(step: NativeStep) -> str | None:
        """Why windows of a model cannot be run in one call; None when they can."""
        ple = step.spec.ple
        if step.tables:
            return "rows of n-gram tables are read by Python"
        if ple is not None and ple.ngram_size + WINDOW_ROWS > abi.RECENT_IDS:
            return f"n-grams of {ple.ngram_size}"
        return None

    def seat(self, slot: int, params: SamplingParams, history: TokenHistory | None) -> None:
        """See WholeWindow."""
        self._ahead[slot] = None
        alive = self._alive[slot] = [history]
        row = PickRow(params=params, position=0, num_output=params.min_tokens, history=history)
        self._seats[slot].row = made_row(row, alive)
        gate, stops = self._gates[slot], params.stop_token_ids
        gate.stops, gate.num_stops = made_ids(stops, alive) if stops else None, len(stops)

    def ahead(self, works: Sequence[WindowWork]) -> None:
        """See WholeWindow."""
        step, slots = self._step, self._slots[len(works)]
        slots[:] = [work.step.slot for work in works]
        for work in works:
            self._ask(work, is_drafted=False)
            self._ahead[work.step.slot] = work
        self._ahead_s = step.library.ahead(
            step.handle,
            self._seats,
            slots,
            len(works),
            self._num_token_ids,
            step.window_streams.data_ptr(),
        )

    def run(self, works: Sequence[WindowWork]) -> tuple[list[WindowYield], WindowTimes]:
        """See WholeWindow."""
        step, seconds, slots = self._step, self._seconds, self._slots[len(works)]
        slots[:] = [work.step.slot for work in works]
        ahead_s = 0.0
        for work in works:
            is_drafted = self._is_drafted(work)
            if is_drafted:
                ahead_s = self._ahead_s
            self._ask(work, is_drafted=is_drafted)
            self._ahead[work.step.slot] = None
        step.library.window(
            step.handle,
            self._seats,
            slots,
            len(works),
            self._context,
            self._num_token_ids,
            step.window_streams.data_ptr(),
            step.window_logits.data_ptr(),
            seconds,
        )
        times = WindowTimes(
            prefill_s=0.0, draft_s=ahead_s + seconds[0], verify_s=seconds[1], ahead_s=ahead_s
        )
        return [self._yielded(slot) for slot in slots], times

    def _is_drafted(self, work: WindowWork) -> bool:
        """Whether the drafts that were made ahead are what drafting now would give."""
        ahead, step = self._ahead[work.step.slot], work.step
        if ahead is None or ahead.num_computed != work.num_computed:
            return False
        num_drafted = self._found[step.slot][0]
        is_long_enough = step.max_draft <= ahead.step.max_draft or (
            num_drafted < ahead.step.max_draft
        )
        return is_long_enough and step.spec_min_p == ahead.step.spec_min_p

    def _ask(self, work: WindowWork, *, is_drafted: bool) -> None:
        step, pending = work.step, work.num_pending
        ids = work.ids[-abi.RECENT_IDS :]
        if len(ids) < abi.RECENT_IDS:
            ids = [*self._padding[len(ids) :], *ids]
        self._gates[step.slot].min_p = step.spec_min_p
        waiting = _NEVER_DRAFTS if pending is None else pending
        asked = (work.num_computed, waiting, step.max_draft, is_drafted)
        self._asked[step.slot][:] = (*asked, *ids)

    def _yielded(self, slot: int) -> WindowYield:
        num_drafted, num_accepted, is_finite, num_tokens, *tokens = self._found[slot]
        if not is_finite:
            return WindowYield(None, num_drafted, 0)
        return WindowYield(tuple(tokens[:num_tokens]), num_drafted, num_accepted)
