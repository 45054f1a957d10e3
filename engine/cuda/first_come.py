"""Which experts get the slots of a layer where no profile says so: those that come first, and nobody is evicted later.

At the start slots hold experts by number, unclaimed. What a window's rows chose claims the slot it lies in, or, if it
lies in host memory, trades places with an expert in an unclaimed slot of its layer: between two windows, and no more at
once than the bus takes in about a millisecond. Where every slot is claimed nothing is done any more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.cuda.layout import MAX_ROWS
from engine.cuda.tiers import TradeRoom, trade_places

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from engine.cuda.moe import MoeScratch, MoeWeights
    from engine.cuda.pool import FarPool
    from engine.cuda.tiers import FarExperts
    from engine.model_spec import ModelSpec

_log = logging.getLogger("engine.startup")

TRADED_BYTES = 32 << 20
"""Of experts that trade places between two windows, both ways: what a bus takes in about a millisecond."""

_SETTLED, _FAR, _UNCLAIMED = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trade:
    """An expert that came, from host memory, takes the slot of one that nobody has asked for."""

    layer: int
    comes: int
    leaves: int


class Claims:
    """Who came first, by layer: decides, and moves nothing."""

    def __init__(self, in_slots: Sequence[Iterable[int]], num_experts: int) -> None:
        """in_slots: of each layer the experts that lie in slots, all unclaimed."""
        # What each expert is to its layer, and whether that has an unclaimed slot. In numpy, where so little work
        # takes a fifth of the time.
        self._kinds = np.full((len(in_slots), num_experts), _FAR, np.uint8)
        for kinds, experts in zip(self._kinds, in_slots, strict=True):
            kinds[list(experts)] = _UNCLAIMED
        # A layer without far experts, or without slots, has nothing to trade.
        self._is_open = (self._kinds == _FAR).any(1)
        self._next_layer = 0
        self._settle()

    @property
    def is_settled(self) -> bool:
        """Whether no layer has an unclaimed slot and experts that might want it."""
        return not self._is_open.any()

    @property
    def num_unclaimed(self) -> int:
        """Slots that may still change hands, in all layers."""
        return int((self._kinds[self._is_open] == _UNCLAIMED).sum())

    def come(self, ids: Tensor, most: int) -> list[Trade]:
        """What rows chose, int [layers, R, k], in the order in which they are asked for; at most so many trades.

        First those in slots claim theirs, which needs no copy. The layer behind the last trade's is first in the next
        call, so that a limit holds up no layer for long. What found no room in the limit may come again.
        """
        num_layers = self._kinds.shape[0]
        turn = (np.arange(num_layers) + self._next_layer) % num_layers
        chosen = ids.numpy().reshape(num_layers, -1)[turn]
        kinds = self._kinds[turn[:, None], chosen]
        places = np.nonzero(kinds == _UNCLAIMED)
        self._kinds[turn[places[0]], chosen[places]] = _SETTLED
        self._settle()
        places = np.nonzero((kinds == _FAR) & self._is_open[turn, None])
        pairs = zip(turn[places[0]].tolist(), chosen[places].tolist(), strict=True)
        trades = list(self._trades(pairs, most))
        if trades:
            self._next_layer = (trades[-1].layer + 1) % num_layers
        self._settle()
        return trades

    def _trades(self, far: Iterable[tuple[int, int]], most: int) -> Iterator[Trade]:
        done: set[tuple[int, int]] = set()
        full: set[int] = set()
        for layer, expert in far:
            if len(done) == most:
                return
            if layer in full or (layer, expert) in done:
                continue
            kinds = self._kinds[layer]
            leaves = int(kinds.argmax())
            if kinds[leaves] != _UNCLAIMED:
                full.add(layer)
                continue
            kinds[expert], kinds[leaves] = _SETTLED, _FAR
            done.add((layer, expert))
            yield Trade(layer=layer, comes=expert, leaves=leaves)

    def _settle(self) -> None:
        self._is_open &= (self._kinds == _UNCLAIMED).any(1)


class TradingLayer:
    """Which slot or host place each expert of one layer has, and how two of them trade."""

    def __init__(self, weights: MoeWeights, far: FarExperts) -> None:
        """Slots hold their experts in rising order."""
        self._gate_up, self._down = weights.gate_up, weights.down
        self.far = far
        order = far.order.tolist()
        near = [expert for expert, place in enumerate(order) if place < 0]
        self._slots = {expert: slot for slot, expert in enumerate(near)}
        self._places = {expert: place for expert, place in enumerate(order) if place >= 0}

    @property
    def in_slots(self) -> list[int]:
        """The experts in slots."""
        return list(self._slots)

    def trade(self, comes: int, leaves: int, room: TradeRoom) -> None:
        """Contents and tables on the device, on the current stream."""
        slot, place = self._slots.pop(leaves), self._places.pop(comes)
        self._slots[comes], self._places[leaves] = slot, place
        trade_places((self._gate_up, self._down), self.far, (comes, slot), (leaves, place), room)


class FirstCome:
    """The trunk's experts of a model whose slots go to those that come first. One thread calls it.

    Windows write what they choose to one buffer for all layers; it is copied to the host behind them, and read before
    the next if the device is done by then: nobody waits. Prompt pieces do not count: a long one asks for nearly every
    expert, so that slots would go to its first rows' at once, and it stages far experts anyway.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[MoeWeights],
        device: torch.device,
        pool: FarPool | None = None,
    ) -> None:
        """layers: of the trunk, each with `far`; pool: what else knows where far experts lie."""
        shape = (len(layers), MAX_ROWS, spec.moe.num_active)
        is_cuda = device.type == "cuda"
        self._layers = [TradingLayer(x, x.far) for x in layers if x.far is not None]
        self._numbers = {id(layer.far): number for number, layer in enumerate(self._layers)}
        self._device = device
        self._pool = pool
        self.claims = Claims([layer.in_slots for layer in self._layers], spec.moe.num_experts)
        self._room = TradeRoom.make(spec, device)
        self._most = max(1, TRADED_BYTES // (2 * self._room.num_bytes))
        self._routes = torch.zeros(shape, dtype=torch.int32, device=device)
        self._seen = torch.zeros(shape, dtype=torch.int32, pin_memory=is_cuda)
        self._is_seen = torch.cuda.Event() if is_cuda else None
        self._num_rows = 0
        self._has_ended = self.claims.is_settled

    @property
    def tensors(self) -> tuple[TradeRoom, Tensor]:
        """What lies on the device."""
        return self._room, self._routes

    @property
    def seen(self) -> Tensor:
        """What lies in the host's memory: what the last window chose, int32 [layers, MAX_ROWS, k]."""
        return self._seen

    def scratch(self, shared: MoeScratch, far: FarExperts) -> MoeScratch:
        """A layer's own: its choices are kept until they are copied."""
        return replace(shared, ids=self._routes[self._numbers[id(far)]])

    def watch(self, num_rows: int) -> None:
        """Behind a window: have what its rows chose sent to the host."""
        if self._has_ended:
            return
        self._seen.copy_(self._routes, non_blocking=True)
        if self._is_seen is not None:
            self._is_seen.record(torch.cuda.current_stream(self._device))
        self._num_rows = num_rows

    def admit(self) -> None:
        """Before a window: let those that the last one chose claim slots. Copies go by the stream that runs windows,
        so that what it runs sees each expert, and the tables, in the old place or in the new."""
        if self._has_ended or not self._num_rows:
            return
        if self._is_seen is not None and not self._is_seen.query():
            return
        trades = self.claims.come(self._seen[:, : self._num_rows], self._most)
        self._num_rows = 0
        for trade in trades:
            self._layers[trade.layer].trade(trade.comes, trade.leaves, self._room)
        if self._pool is not None:
            for layer in {trade.layer for trade in trades}:
                self._pool.follow(self._layers[layer].far)
        if self.claims.is_settled:
            _log.info("every slot of the expert cache is claimed: nothing moves any more")
            self.end()

    def end(self) -> None:
        """Nothing moves any more."""
        self._has_ended = True
