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

    The formula divides by S three times: before the SiLU, before the sigmoid, in the mean. All three read the normed
    streams, so `norm` gives them divided by S. down_inject: W [rank + S, S*H], the injection's rows halved (or
    [rank, S*H] without injection); up: W [S*H, rank].
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
        down = self._down(normed)
        mix = sigmoid(self._up(silu(down[:, : self._rank]))).mul_(normed)
        mixed = mix.view(mix.shape[0], self._streams, -1).sum(1)
        # 2 sigmoid(x) = 1 + tanh(x / 2); the weight's rows are halved already.
        return mixed, down[:, self._rank :].tanh().add_(1.0)


def write_back(streams: Tensor, inject: Tensor, output: Tensor) -> Tensor:
    """streams [T, S*H] + outer(inject [T, S], output [T, H]), in place."""
    shaped = streams.unflatten(-1, (inject.shape[-1], -1))
    shaped.addcmul_(inject.unsqueeze(-1), output.unsqueeze(-2))
    return streams
