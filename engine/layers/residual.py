"""Gated residual over several streams: what a block reads and how its output goes back (model.md 1.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.elementwise import sigmoid, silu

if TYPE_CHECKING:
    from torch import Tensor

    from engine.layers.norm import ZeroCentredNorm
    from engine.linear import RowLinear


class GatedResidual:
    """Reads one mixed row [T, H] from the streams [T, S*H], and gives each stream's injection weight [T, S].

    down_inject: W [rank + S, S*H] (or [rank, S*H] without injection), up: W [S*H, rank].
    """

    __slots__ = ("_down", "_hidden", "_norm", "_rank", "_streams", "_up")

    def __init__(
        self,
        *,
        norm: ZeroCentredNorm,
        down_inject: RowLinear,
        up: RowLinear,
        num_streams: int,
        rank: int,
    ) -> None:
        self._norm = norm
        self._down = down_inject
        self._up = up
        self._streams = num_streams
        self._rank = rank

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        return self._norm.num_bytes + self._down.num_bytes + self._up.num_bytes

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """streams [T, S*H] -> mixed [T, H] and injection weights [T, S] (empty last axis in a final mixer)."""
        normed = self._norm(streams)
        down = self._down(normed).mul_(1.0 / self._streams)
        mix = sigmoid(self._up(silu(down[:, : self._rank])))
        weighted = mix.mul_(normed).unflatten(-1, (self._streams, -1))
        inject = sigmoid(down[:, self._rank :]).mul_(2.0)
        return _stream_mean(weighted), inject


def write_back(streams: Tensor, inject: Tensor, output: Tensor) -> Tensor:
    """streams [T, S*H] + outer(inject [T, S], output [T, H]), in place."""
    shaped = streams.unflatten(-1, (inject.shape[-1], -1))
    shaped.addcmul_(inject.unsqueeze(-1), output.unsqueeze(-2))
    return streams


def _stream_mean(x: Tensor) -> Tensor:
    """Mean over axis 1 of [T, S, H], summed in stream order so that the order never depends on T."""
    total = x[:, 0] + x[:, 1]
    for stream in range(2, x.shape[1]):
        total += x[:, stream]
    return total.mul_(1.0 / x.shape[1])
