"""Streams from one stage to the next: torch.distributed point to point, NCCL between GPUs, gloo between CPUs.

Tensors only go forward, each pair of neighbours in the order in which they were sent, so nobody can wait in a circle.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from pathlib import Path

_TIMEOUT = timedelta(hours=24)
"""A stage that waits longest waits for work; who is lost shows at its socket."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A tensor that was asked for. `wait` gives it: on a GPU to the current stream, without stopping the host."""

    _work: dist.Work
    _tensor: Tensor

    def wait(self) -> Tensor:
        """Raises RuntimeError when the sender is gone."""
        self._work.wait()
        return self._tensor


class StageLink:
    """One stage's place in the row. A process has one at a time."""

    def __init__(self, store: Path, index: int, count: int, device: torch.device) -> None:
        """Returns when all stages are there."""
        if sys.platform == "linux":
            # All stages are on this machine, so nobody listens on its network.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        # Point to point needs no multicast, which some hosts cannot take.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        self._index = index
        self._device = device
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(str(store), count),  # pyright: ignore[reportPrivateImportUsage]
            rank=index,
            world_size=count,
            timeout=_TIMEOUT,
        )
        self._num_received = self._num_sent = 0
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Incoming:
        """Ask the stage before this one for its next tensor."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        work = dist.irecv(tensor, self._index - 1, tag=self._num_received)
        assert work is not None
        self._num_received += 1
        return Incoming(work, tensor)

    def send(self, tensor: Tensor) -> None:
        """Send to the stage after this one; nobody may write to the tensor any more."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        work = dist.isend(tensor, self._index + 1, tag=self._num_sent)
        assert work is not None
        self._num_sent += 1
        self._sending.append((work, tensor))

    def close(self) -> None:
        """Leave the row."""
        self._sending.clear()
        dist.destroy_process_group()
