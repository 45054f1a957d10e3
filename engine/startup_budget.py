"""How many experts the device takes, decided from numbers alone: the formula, the reserve, and what is refused.

Nothing is allocated and nothing is measured here: whoever asks says how much memory is free. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import PlanRefused
from engine.memory_plan import MIB

DEFAULT_RESERVE_MIB = 700
MIN_RESERVE_MIB = 300
"""Below this the reserve is never lowered by itself."""
LOW_MIB = 256
"""With less free memory a driver begins to page, and a request may hang for good."""
_SPARE_MIB = 512
"""How much more than nothing the advice of the LOW check aims at."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRequest:
    """What the options ask for."""

    num_slots: int | None = None
    """None: auto."""
    reserve_mib: int | None = None
    """None: the default, which may be lowered; a number given by hand never is."""
    num_ranked: int | None = None
    """Pairs that the profile ranks; None without a profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRoom:
    """What is there when the expert cache is opened, after weights, sessions, drafter and head."""

    free_bytes: int
    blob_bytes: int
    """The largest expert."""
    num_pairs: int
    """All (layer, expert) pairs."""
    min_slots: int
    """The smallest cache that works: what one token routes to."""
    prompt_bytes: int
    """Buffers of the prompt path, allocated later."""
    draft_bytes: int
    """Buffers of the verifier and the draft layer's head, allocated later."""
    session_bytes: int = 0

    @property
    def later_bytes(self) -> int:
        """What will still be allocated."""
        return self.prompt_bytes + self.draft_bytes


_SESSION_ADVICE = "lower --max-context, --batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """The answer, and the lines that say how it came about."""

    num_slots: int
    reserve_mib: int
    was_lowered: bool
    lines: tuple[str, ...]


def size_cache(request: CacheRequest, room: CacheRoom) -> CacheSize:
    """Slots of tier one. Raises PlanRefused, with what is needed, what is there and the option to change."""
    useful = _useful_slots(request, room)
    if request.num_slots is not None:
        return _explicit(request, room, useful)
    wanted = min(useful, room.min_slots)
    reserve, line = _reserve(request, room, wanted)
    slots = min(_fitting(room, reserve), useful)
    if slots <= 0:
        raise PlanRefused(_no_room(room, reserve))
    lines = (
        f"expert cache auto: {room.free_bytes / GIB:.2f} GiB free, {reserve} MiB reserved "
        f"(+{room.prompt_bytes / MIB:.0f} MiB for the prompt path, "
        f"+{room.draft_bytes / MIB:.0f} MiB for the draft head) -> {slots} slots",
        *line,
    )
    return CacheSize(num_slots=slots, reserve_mib=reserve, was_lowered=bool(line), lines=lines)


def low_memory_line(free_bytes: int, cache: CacheSize) -> str | None:
    """The check at the end of a start: what to say if less than LOW_MIB are free. It never stops the start."""
    free_mib = free_bytes // MIB
    if free_mib >= LOW_MIB:
        return None
    if cache.was_lowered:
        return f"LOW: {free_mib} MiB are free; the model only just fits, the reserve was already lowered"
    wanted = cache.reserve_mib + _SPARE_MIB - free_mib
    return f"LOW: {free_mib} MiB are free, {LOW_MIB} are safe: give --vram-reserve-mib {wanted}"


def slots_per_layer(num_slots: int, useful: tuple[int, ...]) -> tuple[int, ...]:
    """Divide slots among layers as evenly as can be; no layer gets more than it has useful pairs."""
    share = [0] * len(useful)
    left = num_slots
    for level in range(max(useful, default=0)):
        for layer, count in enumerate(useful):
            if left and count > level:
                share[layer] += 1
                left -= 1
    return tuple(share)


def _useful_slots(request: CacheRequest, room: CacheRoom) -> int:
    """A slot without a candidate is wasted memory."""
    return room.num_pairs if request.num_ranked is None else request.num_ranked


def _fitting(room: CacheRoom, reserve_mib: int) -> int:
    return (room.free_bytes - reserve_mib * MIB - room.later_bytes) // room.blob_bytes


def _reserve(request: CacheRequest, room: CacheRoom, wanted: int) -> tuple[int, tuple[str, ...]]:
    """The reserve in MiB, and a line if it was lowered to what leaves `wanted` slots."""
    if request.reserve_mib is not None:
        return request.reserve_mib, ()
    if _fitting(room, DEFAULT_RESERVE_MIB) >= wanted:
        return DEFAULT_RESERVE_MIB, ()
    left = room.free_bytes - room.later_bytes - wanted * room.blob_bytes
    lowered = max(MIN_RESERVE_MIB, left // MIB)
    line = (
        f"--vram-reserve-mib: lowered from {DEFAULT_RESERVE_MIB} to {lowered} MiB, which leaves "
        f"{max(0, _fitting(room, lowered))} of the {wanted} slots that one token needs"
    )
    return lowered, (line,)


def _explicit(request: CacheRequest, room: CacheRoom, useful: int) -> CacheSize:
    slots = request.num_slots
    assert slots is not None
    if slots > useful:
        what = "pairs of layer and expert" if request.num_ranked is None else "pairs in the profile"
        raise PlanRefused(f"--expert-cache {slots}: there are {useful} {what}; give at most that")
    reserve = DEFAULT_RESERVE_MIB if request.reserve_mib is None else request.reserve_mib
    needed = slots * room.blob_bytes + room.later_bytes
    if needed > room.free_bytes:
        left = room.free_bytes - room.later_bytes
        advice = (
            f"give at most {left // room.blob_bytes}, or auto" if left >= 0 else _SESSION_ADVICE
        )
        raise PlanRefused(
            f"--expert-cache {slots}: needs {needed / MIB:.0f} MiB with the buffers that follow, but "
            f"{max(0, room.free_bytes) / MIB:.0f} MiB are free beside weights and sessions of "
            f"{room.session_bytes / MIB:.0f} MiB: {advice}"
        )
    line = (
        f"expert cache: {slots} slots, {slots * room.blob_bytes / MIB:.0f} MiB of "
        f"{room.free_bytes / GIB:.2f} GiB free"
    )
    return CacheSize(num_slots=slots, reserve_mib=reserve, was_lowered=False, lines=(line,))


def _no_room(room: CacheRoom, reserve_mib: int) -> str:
    needed = reserve_mib * MIB + room.later_bytes + room.blob_bytes
    advice = f"{_SESSION_ADVICE} or --vram-reserve-mib"
    if room.free_bytes >= room.later_bytes:
        advice += ", or give --expert-cache 0: all experts on the host"
    return (
        f"--expert-cache auto: one slot needs {needed / MIB:.0f} MiB free ({reserve_mib} MiB reserved, "
        f"{room.prompt_bytes / MIB:.0f} MiB for the prompt path, {room.draft_bytes / MIB:.0f} MiB for the draft head, "
        f"{room.blob_bytes / MIB:.1f} MiB an expert), but {max(0, room.free_bytes) / MIB:.0f} MiB are free: "
        f"{(needed - room.free_bytes) / MIB:.0f} MiB short; the sessions take {room.session_bytes / MIB:.0f} MiB: "
        f"{advice}"
    )
