"""Where each 4-bit expert of a layer lies: in a slot on the device, or in host memory that kernels read over the bus.

Kernels find an expert by its address, so a window's graph is the same wherever experts lie, and the product is the same
kernel over the same bits. Plain torch; filled at the start. Later two experts may trade places, and nothing else moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.arena import pin_memory
from engine.cuda.quant import QUARTER, Packed4, packed_shape
from engine.errors import ExpertsNotReady
from engine.memory_plan import num_staged

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.model_spec import ModelSpec

ALIGN_BYTES = 16
"""What kernels read at once, and are told that every address is a multiple of."""


@dataclass(frozen=True, slots=True)
class FarExperts:
    """What a layer of E experts has when F of them lie in host memory.

    gate_up, down: those F, pinned. up_at, down_at int64 [E, 2]: where the words and scales of each of the E experts
    begin; order int32 [E]: which of the F it is, -1 for one in a slot; ids int32 [F]: the experts' numbers.
    """

    gate_up: Packed4
    down: Packed4
    up_at: Tensor
    down_at: Tensor
    order: Tensor
    ids: Tensor

    @property
    def count(self) -> int:
        """F: how many lie in host memory."""
        return self.ids.shape[0]

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """What is on the device."""
        return self.up_at, self.down_at, self.order, self.ids


@dataclass(frozen=True, slots=True)
class StagedExperts:
    """Device memory for a few far experts, through which a long prompt piece reads them once."""

    gate_up: Packed4
    down: Packed4

    @property
    def count(self) -> int:
        """How many fit."""
        return self.down.words.shape[0]

    @staticmethod
    def make(spec: ModelSpec, device: torch.device) -> StagedExperts:
        """As many as the memory plan says."""
        up, down = empty_experts(spec, 1, torch.device("meta"))
        count = num_staged(spec, up.num_bytes + down.num_bytes)
        return StagedExperts(*empty_experts(spec, count, device))


@dataclass(frozen=True, slots=True)
class TradeRoom:
    """Device memory for one expert, and addresses int64 [2] of one, on their way between two places."""

    gate_up: Packed4
    down: Packed4
    addresses: Tensor

    @property
    def num_bytes(self) -> int:
        """Of one expert."""
        return self.gate_up.num_bytes + self.down.num_bytes

    @staticmethod
    def make(spec: ModelSpec, device: torch.device) -> TradeRoom:
        """For experts of one model."""
        addresses = torch.empty(2, dtype=torch.int64, device=device)
        return TradeRoom(*empty_experts(spec, 1, device), addresses)


class ExpertPlaces:
    """One layer's experts while they are read: every one goes to a slot or to host memory."""

    def __init__(self, spec: ModelSpec, near: Iterable[int], device: torch.device) -> None:
        """near: the experts that get a slot, one each."""
        self._spec = spec
        self._device = device
        self._near = sorted(near)
        self._far = sorted(set(range(spec.moe.num_experts)) - set(self._near))
        self._slots = empty_experts(spec, len(self._near), device)
        self._host = empty_experts(spec, 0, _host_beside(device))
        self._homes = self._find_homes()

    def open_host(self) -> None:
        """Take the memory of those that have no slot."""
        self._host = empty_experts(self._spec, len(self._far), _host_beside(self._device))
        if self._device.type == "cuda" and self._far:
            for part in self._host:
                pin_memory(part.words)
                pin_memory(part.scales)
        self._homes = self._find_homes()

    def _find_homes(self) -> dict[int, tuple[tuple[Packed4, Packed4], int]]:
        return {
            expert: (tier, place)
            for tier, experts in ((self._slots, self._near), (self._host, self._far))
            for place, expert in enumerate(experts)
        }

    def put(self, expert: int, gate_up: Packed4, down: Packed4) -> None:
        """Copy an expert, [1, N, K] of each, to where it belongs."""
        tier, place = self._homes[expert]
        for home, part in zip(tier, (gate_up, down), strict=True):
            home.words[place].copy_(part.words[0])
            home.scales[place].copy_(part.scales[0])

    @property
    def slots(self) -> tuple[Packed4, Packed4]:
        """gate_up and down of the experts on the device, in rising order."""
        return self._slots

    def far(self) -> FarExperts:
        """The others, and where each expert is found. The tables are made last: addresses must not change."""
        count = self._spec.moe.num_experts
        order = [-1] * count
        for place, expert in enumerate(self._far):
            order[expert] = place
        gate_up, down = self._host
        return FarExperts(
            gate_up=gate_up,
            down=down,
            up_at=self._addresses(0),
            down_at=self._addresses(1),
            order=torch.tensor(order, dtype=torch.int32, device=self._device),
            ids=torch.tensor(self._far, dtype=torch.int32, device=self._device),
        )

    def _addresses(self, part: int) -> Tensor:
        rows: list[list[int]] = []
        for expert in range(self._spec.moe.num_experts):
            tier, place = self._homes[expert]
            home = tier[part]
            # Unified addressing: where pinned memory lies for the host, it lies for the device.
            rows.append([_address(home.words, place), _address(home.scales, place)])
        return torch.tensor(rows, dtype=torch.int64, device=self._device)


def trade_places(
    slots: tuple[Packed4, Packed4],
    far: FarExperts,
    comes: tuple[int, int],
    leaves: tuple[int, int],
    room: TradeRoom,
) -> None:
    """Bits and tables of two experts, on the current stream and without waiting; nothing may run beside it.

    slots: gate_up and down; comes: the expert from host memory and its slot from now on; leaves: the one in that slot,
    and its place in host memory from now on.
    """
    (new, slot), (old, place) = comes, leaves
    parts = (*slots, far.gate_up, far.down, room.gate_up, room.down)
    for name in ("words", "scales"):
        up, down, far_up, far_down, spare_up, spare_down = (getattr(part, name) for part in parts)
        _swap(up[slot], far_up[place], spare_up[0])
        _swap(down[slot], far_down[place], spare_down[0])
    for table in (far.up_at, far.down_at):
        _swap(table[new], table[old], room.addresses)
    far.order[new].fill_(-1)
    far.order[old].fill_(place)
    far.ids[place].fill_(old)


def _swap(one: Tensor, other: Tensor, spare: Tensor) -> None:
    spare.copy_(one, non_blocking=True)
    one.copy_(other, non_blocking=True)
    other.copy_(spare, non_blocking=True)


def empty_experts(spec: ModelSpec, count: int, device: torch.device) -> tuple[Packed4, Packed4]:
    """Room for gate_up and down of so many experts."""
    hidden, width = spec.hidden, spec.moe.expert_dim
    return _empty(count, 2 * width, hidden, device), _empty(count, hidden, width, device)


def _empty(count: int, rows: int, columns: int, device: torch.device) -> Packed4:
    scales = packed_shape(count, rows, columns)
    return Packed4(
        words=torch.empty((*scales, QUARTER), dtype=torch.int16, device=device),
        scales=torch.empty(scales, dtype=torch.bfloat16, device=device),
    )


def _host_beside(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "cuda" else device


def _address(tensor: Tensor, place: int) -> int:
    return tensor.data_ptr() + place * tensor.stride(0) * tensor.element_size()


def hits_ready(layers: Iterable[tuple[Packed4, Packed4, FarExperts | None]]) -> bool:
    """Whether every expert of every tiered layer is found. layers: gate_up and down in slots, and the rest.

    Raises ExpertsNotReady naming the first faults. All or nothing: an address that is none, or another expert's, would
    give wrong tokens instead of none.
    """
    faults = [
        f"layer {number}: {fault}"
        for number, (gate_up, down, far) in enumerate(layers)
        if far is not None
        for fault in _faults(gate_up, down, far)
    ]
    if faults:
        shown = "; ".join(faults[:3])
        raise ExpertsNotReady(f"{len(faults)} faults in the expert tables: {shown}")
    return True


def _faults(gate_up: Packed4, down: Packed4, far: FarExperts) -> list[str]:
    """Addresses that are not one expert's own, and experts in the host's memory that are counted wrongly."""
    found: list[str] = []
    for name, table, near, host in (
        ("gate_up", far.up_at, gate_up, far.gate_up),
        ("down", far.down_at, down, far.down),
    ):
        for column, kind in enumerate(("words", "scales")):
            homes = [
                {_address(getattr(part, kind), place) for place in range(part.words.shape[0])}
                for part in (near, host)
            ]
            found += _wrong_addresses(f"{name} {kind}", table[:, column].tolist(), far, homes)
    ids, order = far.ids.tolist(), far.order.tolist()
    if [order[expert] for expert in ids] != list(range(len(ids))):
        found.append(f"{len(ids)} experts in host memory are not in their order")
    return found


def _wrong_addresses(
    name: str, addresses: list[int], far: FarExperts, homes: list[set[int]]
) -> list[str]:
    order = far.order.tolist()
    found: list[str] = []
    seen: set[int] = set()
    for expert, (address, place) in enumerate(zip(addresses, order, strict=True)):
        if address not in homes[place >= 0]:
            tier = "host memory" if place >= 0 else "a slot"
            found.append(f"{name} of expert {expert} at {address:#x} are not in {tier}")
        elif address in seen or address % ALIGN_BYTES:
            found.append(f"{name} of expert {expert} at {address:#x} are shared or misplaced")
        seen.add(address)
    unused = len((homes[0] | homes[1]) - seen)
    if unused:
        found.append(f"{unused} places of {name} hold nobody's")
    return found
