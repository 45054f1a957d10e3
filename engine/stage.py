"""A stage's process: `python -m engine.stage --fd N` holds a run of layers and follows orders until the socket closes.

See engine.stages for who says what to whom.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from engine.config import model_path
from engine.errors import EngineError
from engine.instruments import count_allocations
from engine.loading import load_part
from engine.memory_plan import Step
from engine.parked import CheckpointMark, ParkedStates
from engine.sources.opening import read_spec
from engine.stage_link import StageLink
from engine.stage_wire import (
    BeginSlot,
    ClearSlot,
    DropParked,
    LoadStage,
    MoveCheckpoint,
    MovePages,
    Order,
    Report,
    StageChunk,
    StageCommit,
    StageFailed,
    StageLog,
    StagePipe,
    StageReady,
    StageWindow,
)
from engine.stages import split_layers
from engine.state import KeptRows, Rows
from engine.worker import EXIT_FAILED, EXIT_OK, die_with_parent

if TYPE_CHECKING:
    from torch import Tensor

    from engine.config import EngineConfig
    from engine.loading import Loaded
    from engine.model_spec import ModelSpec
    from engine.steps import PartSteps

_NO_MARK = CheckpointMark(num_computed=0, num_draft_cells=None)
"""The engine keeps a checkpoint's counters."""


class _PipeLogHandler(logging.Handler):
    """Sends log records to the engine."""

    def __init__(self, pipe: StagePipe) -> None:
        super().__init__(logging.INFO)
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        self._pipe.send(StageLog(level=record.levelno, text=self.format(record)))


@dataclass(frozen=True, slots=True)
class Source:
    """Where a stage's layers come from."""

    read_spec: Callable[[EngineConfig], ModelSpec]
    """Of the whole model."""
    load: Callable[[EngineConfig, ModelSpec, torch.device], Loaded]
    """One part of it."""


CHECKPOINT = Source(lambda config: read_spec(model_path(config.model), config.parts), load_part)


class Stage:
    """Layers and state of one stage, and what its orders mean."""

    def __init__(self, load: LoadStage, source: Source) -> None:
        """Raises what load_engine raises."""
        spec = source.read_spec(load.config)
        runs = split_layers(spec.num_layers, load.count)
        self._load = load
        self._spec = spec.part(runs[load.index])
        # Every row's ids come with as many before them as any of the model's layers needs.
        self._context = spec.ple.ngram_size if spec.ple else 1
        self._device = torch.device(load.config.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._loaded = source.load(load.config, self._spec, self._device)
        # The only ones without a door for streams run whole models alone.
        self._trunk = cast("PartSteps", self._loaded.trunk)
        self._state = self._loaded.state
        self._dtype = self._loaded.plan.dtype
        self._parked = ParkedStates(self._state)
        self._empty = torch.empty(0, device=self._device)
        self._rehearse()

    def ready(self) -> StageReady:
        """What the engine is told of this stage."""
        return StageReady(
            kernels=self._loaded.kernels,
            memory_plan=self._loaded.plan_items(),
            page_bytes=self._parked.page_bytes,
            checkpoint_bytes=self._parked.checkpoint_bytes,
        )

    def join(self) -> None:
        """Take the place in the row."""
        load = self._load
        self._link = StageLink(Path(load.store), load.index, load.count, self._device)

    def obey(self, order: Order | Report) -> None:
        """Carry out one order; on a GPU only its launches are done then."""
        parked = self._parked
        match order:
            case StageWindow(slots=slots, counts=counts, starts=starts):
                for slot in slots:
                    parked.wait(slot)
                ids = self._ids(order.ids)
                rows = Rows(slots, counts, starts, self._device)
                self._link.send(
                    self._trunk.window(ids, rows, self._state, self._streams(ids)).clone()
                )
            case StageChunk(slot=slot, start=start):
                parked.wait(slot)
                ids = self._ids(order.ids)
                self._link.send(
                    self._trunk.chunk(ids, slot, start, self._state, self._streams(ids))
                )
                if order.checkpoint_id is not None:
                    parked.save_checkpoint(order.checkpoint_id, slot, _NO_MARK)
            case StageCommit(kept=kept):
                # There is no draft layer here, for which streams would have to wait.
                self._trunk.commit(
                    {s: KeptRows(0, n) for s, n in kept.items()}, self._empty, self._state
                )
            case BeginSlot(slot=slot):
                parked.wait(slot)
                self._state.begin(slot)
            case ClearSlot(slot=slot):
                self._state.clear_kv(slot)
            case MovePages(slot=slot, pages=pages, to_slot=to_slot):
                (parked.load_pages if to_slot else parked.save_pages)(slot, pages)
            case MoveCheckpoint(checkpoint_id=checkpoint_id, slot=slot, to_slot=True):
                parked.wait(slot)
                parked.load_checkpoint(checkpoint_id, slot)
            case MoveCheckpoint(checkpoint_id=checkpoint_id, slot=slot):
                parked.save_checkpoint(checkpoint_id, slot, _NO_MARK)
            case DropParked(page_id=int(page_id)):
                parked.drop_page(page_id)
            case DropParked(checkpoint_id=int(checkpoint_id)):
                parked.drop_checkpoint(checkpoint_id)
            case _:
                raise ValueError(f"unexpected {type(order).__name__}")

    def _streams(self, ids: Tensor) -> Tensor | None:
        """From the stage before this one, [T, S*H]; the first embeds the ids instead."""
        if self._spec.is_first:
            return None
        return self._link.receive((ids.shape[0], self._spec.stream_width), self._dtype).wait()

    def _ids(self, data: bytes) -> Tensor:
        flat = torch.frombuffer(bytearray(data), dtype=torch.int64)
        return flat.view(-1, self._context)

    def _rehearse(self) -> None:
        """Read a prompt piece where a context ends and compare what it takes with the plan.

        Beside as many pieces' streams as may be on their way: come from the stage before, or not sent yet.
        """
        limits = self._loaded.plan.limits
        num_rows = limits.piece_tokens
        ids = torch.zeros(num_rows, self._context, dtype=torch.int64)
        shape = (limits.num_groups, num_rows, self._spec.stream_width)
        on_their_way = torch.zeros(shape, dtype=self._dtype, device=self._device)
        streams = None if self._spec.is_first else on_their_way[0]
        first = limits.max_context - num_rows
        # As in the engine: methods are chosen now, for good.
        self._trunk.chunk(ids, 0, first, self._state, streams)
        taken = count_allocations(lambda: self._trunk.chunk(ids, 0, first, self._state, streams))
        self._loaded.marks.reach(Step.PROMPT, passing_bytes=taken.peak_bytes)


def serve(pipe: StagePipe, source: Source) -> int:
    """Load, then follow orders until the engine is gone. Returns the exit status."""
    first = pipe.receive()
    if not isinstance(first, LoadStage):
        return EXIT_FAILED
    try:
        with torch.inference_mode():
            stage = Stage(first, source)
            pipe.send(stage.ready())
            stage.join()
            while (order := pipe.receive()) is not None:
                stage.obey(order)
    except Exception as error:
        # What the engine itself refuses is told in one line, by the engine.
        if not isinstance(error, EngineError):
            logging.getLogger("engine.stage").exception("the stage failed")
        pipe.send(StageFailed(kind=type(error).__name__, message=str(error)))
        return EXIT_FAILED
    return EXIT_OK


def run(fd: int, source: Source) -> int:
    """A stage's whole life on an inherited socket. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    with socket.socket(fileno=fd) as sock:
        pipe = StagePipe(sock)
        logger = logging.getLogger("engine")
        logger.setLevel(logging.INFO)
        logger.addHandler(_PipeLogHandler(pipe))
        try:
            return serve(pipe, source)
        except (BrokenPipeError, ConnectionResetError):
            return EXIT_OK


def main() -> int:
    parser = argparse.ArgumentParser(prog="engine.stage")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the engine")
    return run(parser.parse_args().fd, CHECKPOINT)


if __name__ == "__main__":
    # Without unloading torch and taking leave of the others, who may be gone.
    os._exit(main())
