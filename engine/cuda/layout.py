"""Where a window's rows belong, as device tensors that graphs read: one copy from the host fills them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.interface import MAX_SLOTS
from engine.state import WINDOW_ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_ROWS = MAX_SLOTS * WINDOW_ROWS


class WindowLayout:
    """Rows slot after slot. `for_rows` gives the view that a graph of R rows reads.

    slots, firsts, counts int32 [places]: state slot, first flat row and rows of each place, count 0 where none is;
    row_slots, positions int32 [R]; starts int32 [R]: first flat row of the row's slot; lasts int32 [places]: last row,
    that of place 0 again where none is.
    """

    __slots__ = (
        "counts",
        "firsts",
        "lasts",
        "num_places",
        "packed",
        "positions",
        "row_slots",
        "slots",
        "starts",
    )

    def __init__(self, device: torch.device, num_places: int = MAX_SLOTS) -> None:
        self.num_places = num_places
        size = 4 * num_places + 3 * MAX_ROWS
        self.packed = torch.zeros(size, dtype=torch.int32, device=device)
        sizes = [num_places] * 4 + [MAX_ROWS] * 3
        views = self.packed.split(sizes)
        self.slots, self.firsts, self.counts, self.lasts = views[:4]
        self.row_slots, self.positions, self.starts = views[4:]

    def fill(self, slots: Sequence[int], counts: Sequence[int], starts: Sequence[int]) -> None:
        """Describe a window: distinct slots, rows of each, first position of each. Copies in stream order."""
        places = self.num_places
        empty = places - len(slots)
        firsts = [sum(counts[:b]) for b in range(len(slots))]
        lasts = [f + n - 1 for f, n in zip(firsts, counts, strict=True)]
        rows = [(b, j) for b, n in enumerate(counts) for j in range(n)]
        unused = MAX_ROWS - len(rows)
        values = [
            *slots,
            *[0] * empty,
            *firsts,
            *[0] * empty,
            *counts,
            *[0] * empty,
            *lasts,
            *lasts[:1] * empty,
        ]
        values += [slots[b] for b, _ in rows] + [0] * unused
        values += [starts[b] + j for b, j in rows] + [0] * unused
        values += [firsts[b] for b, _ in rows] + [0] * unused
        # Memory that is not pinned is copied before the call returns, and nobody waits for the device.
        self.packed.copy_(torch.tensor(values, dtype=torch.int32), non_blocking=True)
