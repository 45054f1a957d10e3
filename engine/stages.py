"""A model over several devices: its layers in a row of stages, one process and one device each.

Stage k holds the k-th run of layers. The last stage is the engine itself: it has the head and the draft layer, picks,
accepts and owns the sequences. The others only follow: an order runs a window or a prompt piece through their layers
and passes the streams on, or moves the state of their layers as the engine moves its own. Orders go from the engine to
every stage over a socket, ids with them; streams go from stage to stage (engine.stage_link), so that a window takes one
hop less than there are stages.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import engine
import engine.errors as errors
from engine.errors import ConfigMismatch, EngineError, ModelLoadError
from engine.parked import CheckpointMark, ParkedStates
from engine.stage_link import Incoming, StageLink
from engine.stage_wire import (
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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from engine.config import EngineConfig
    from engine.interface import PlanItem
    from engine.model_spec import ModelSpec
    from engine.state import KeptRows, Rows, SlotState
    from engine.steps import PartSteps

_LOG = logging.getLogger("engine.stages")
_END_S = 2.0
"""How long a stage may take to end before it is killed, and to be seen dead."""
_LAST_STAGE_EXTRA = 4
"""The last stage's other work (head, draft chain, picks) counts as one in so many of the model's layers."""


class StageLost(EngineError):
    """A stage ended or failed; the engine cannot go on without its layers."""


def check_stages(config: EngineConfig, spec: ModelSpec, device: torch.device) -> None:
    """Raises ConfigMismatch if the groups that are asked for cannot be, with found and required."""
    count = config.num_groups
    if count > config.num_slots:
        raise ConfigMismatch(
            f"--batch-groups: found {count}, required at most the {config.num_slots} slots of --batch"
        )
    if config.parked_dir or config.expert_profile or config.expert_cache is not None:
        raise ConfigMismatch(
            f"--batch-groups: found {count}, required 1 with conversation files, an expert profile or an expert cache"
        )
    if count > spec.num_layers:
        raise ConfigMismatch(
            f"--batch-groups: found {count}, required at most the model's {spec.num_layers} layers"
        )
    if device.type != "cuda":
        return
    if str(device) != device.type:
        raise ConfigMismatch(
            f"--device: found {device}, required cuda or auto: --batch-groups {count} takes the first {count} GPUs"
        )
    if count > torch.cuda.device_count():
        raise ConfigMismatch(
            f"--batch-groups: found {count}, required at most the {torch.cuda.device_count()} GPUs that are here"
        )


def split_layers(num_layers: int, count: int) -> tuple[range, ...]:
    """Runs of layers, front to back: equal but for the last stage, which has other work as well. None is empty."""
    total = num_layers + num_layers // _LAST_STAGE_EXTRA
    ends = [
        max(k + 1, min(total * (k + 1) // count, num_layers - count + k + 1))
        for k in range(count - 1)
    ]
    return tuple(range(a, b) for a, b in zip([0, *ends], [*ends, num_layers], strict=True))


def stage_device(device: torch.device, index: int) -> torch.device:
    """Where a stage runs."""
    return torch.device("cuda", index) if device.type == "cuda" else device


class Follower:
    """A stage's process as the engine sees it."""

    def __init__(self, index: int, device: torch.device, program: str) -> None:
        self.name = f"stage {index} ({device})"
        self.ready: StageReady | None = None
        ours, theirs = socket.socketpair()
        with theirs:
            root = str(Path(engine.__path__[0]).parent)
            inherited = os.environ.get("PYTHONPATH")
            self.process = subprocess.Popen(
                (sys.executable, "-P", "-m", program, "--fd", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join((root, inherited) if inherited else (root,))},
            )
        self.pipe = StagePipe(ours)

    def report(self) -> Report | None:
        """The next report but log lines, which are logged; None when the process is gone."""
        while isinstance(found := self.pipe.receive(), StageLog):
            _LOG.log(found.level, "%s: %s", self.name, found.text)
        assert found is None or isinstance(found, Report)
        return found

    def end_of(self, report: Report | None) -> str:
        """Why there is nothing more to expect, in words."""
        if isinstance(report, StageFailed):
            return f"{self.name} failed: {report.kind}: {report.message}"
        try:
            status = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return f"{self.name} closed its socket"
        return f"{self.name} ended with status {status}"

    def reap(self) -> None:
        """Wait until the process has ended, for which its pipe is closed."""
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Stages:
    """All stages but the last, and the last one's end of the row."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        device: torch.device,
        program: str = "engine.stage",
    ) -> None:
        """Start the processes, which load beside the engine; `join` waits for them. Raises as `check_stages`.

        spec: of the whole model; device: cpu or cuda; program: what the others run.
        """
        check_stages(config, spec, device)
        count = config.num_groups
        self.parts = tuple(spec.part(run) for run in split_layers(spec.num_layers, count))
        self.count = count
        where = [stage_device(device, index) for index in range(count)]
        self.device = where[-1]
        self.devices = tuple(map(str, where))
        self._width = spec.stream_width
        self._directory = Path(tempfile.mkdtemp(prefix="stratagate-stages-"))
        self._store = self._directory / "store"
        self._link: StageLink | None = None
        self._lost: str | None = None
        self._is_lost = threading.Event()
        self._closing = False
        self.kept_ahead: set[int] = set()
        """Checkpoints that the others keep behind a piece which the engine has not finished."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._dtype = torch.float32
        self.followers: list[Follower] = []
        try:
            for index, own_device in enumerate(where[:-1]):
                follower = Follower(index, own_device, program)
                self.followers.append(follower)
                own = replace(config, device=str(own_device), max_draft=0)
                follower.pipe.send(
                    LoadStage(config=own, index=index, count=count, store=str(self._store))
                )
        except BaseException:
            self.close()
            raise

    @property
    def part(self) -> ModelSpec:
        """The engine's own layers."""
        return self.parts[-1]

    def join(self, dtype: torch.dtype, on_lost: Callable[[str], None] | None) -> None:
        """Wait until all stages are loaded and in the row. Raises what a stage's load raised.

        on_lost: called, in another thread, when a stage is gone; without it only the next window says so.
        """
        self._dtype = dtype
        for follower in self.followers:
            report = follower.report()
            if isinstance(report, StageFailed):
                raise _load_error(follower.name, report)
            if not isinstance(report, StageReady):
                raise ModelLoadError(f"{follower.end_of(report)} while loading")
            follower.ready = report
        for follower in self.followers:
            watch = threading.Thread(target=self._watch, args=(follower, on_lost), daemon=True)
            watch.start()
        try:
            self._link = StageLink(self._store, self.count - 1, self.count, self.device)
        except RuntimeError as error:
            raise self._why(error) from error

    def _watch(self, follower: Follower, on_lost: Callable[[str], None] | None) -> None:
        report = follower.report()
        if self._closing:
            return
        message = follower.end_of(report)
        if self._lost is None:
            self._lost = message
        self._is_lost.set()
        if on_lost is not None:
            on_lost(message)

    def close(self) -> None:
        """End the processes."""
        self._closing = True
        for follower in self.followers:
            follower.pipe.close()
        for follower in self.followers:
            follower.reap()
        if self._link is not None:
            self._link.close()
            self._link = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def order(self, order: Order) -> None:
        """Tell every stage. Raises StageLost."""
        for follower in self.followers:
            try:
                follower.pipe.send(order)
            except OSError as error:
                raise self._why(error) from error

    def incoming(self, num_rows: int) -> Incoming:
        """The streams [num_rows, S*H] that the stage before the engine will send."""
        assert self._link is not None
        return self._link.receive((num_rows, self._width), self._dtype)

    def wait(self, incoming: Incoming) -> Tensor:
        """Raises StageLost."""
        try:
            return incoming.wait()
        except RuntimeError as error:
            raise self._why(error) from error

    def _why(self, error: Exception) -> StageLost:
        """The socket's end says which stage it was; the tensors' only that somebody is gone."""
        self._is_lost.wait(_END_S)
        return StageLost(self._lost or str(error))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in the other stages."""
        return sum(f.ready.page_bytes for f in self.followers if f.ready is not None)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint in the other stages."""
        return sum(f.ready.checkpoint_bytes for f in self.followers if f.ready is not None)

    def memory_plan(self) -> tuple[PlanItem, ...]:
        """The stages' items, each with its stage's name."""
        return tuple(
            replace(item, name=f"{follower.name}: {item.name}")
            for follower in self.followers
            if follower.ready is not None
            for item in follower.ready.memory_plan
        )

    def describe(self, kernels: str) -> str:
        """One line: what runs where."""
        runs = [
            f"{part.first_layer} to {part.layers.stop - 1} on {device}"
            for part, device in zip(self.parts, self.devices, strict=True)
        ]
        return f"{kernels}; layers {', '.join(runs)}"


class StagedTrunk:
    """The interface of engine.model.Trunk over all stages; `launch_*` let the others begin before the engine can."""

    def __init__(self, trunk: PartSteps, stages: Stages, ngram_context: int) -> None:
        """trunk: the engine's own layers; ngram_context: of the whole model."""
        self.own = trunk
        self.ngram_context = ngram_context
        self._stages = stages
        self._launched: deque[Incoming] = deque()

    def launch_window(self, ids: Tensor, rows: Rows) -> None:
        """Let the other stages begin; `window` of the same rows must follow, in the order of the launches."""
        counts = rows.counts()
        firsts = [last - count + 1 for last, count in zip(rows.last_rows(), counts, strict=True)]
        starts = tuple(rows.host_position[first] for first in firsts)
        self._stages.order(
            StageWindow(slots=rows.slots, counts=counts, starts=starts, ids=_bytes(ids))
        )
        self._launched.append(self._stages.incoming(ids.shape[0]))

    def launch_chunk(
        self, ids: Tensor, slot: int, start: int, checkpoint_id: int | None = None
    ) -> None:
        """Let the other stages begin; `chunk` of the same piece must follow, in the order of the launches.

        checkpoint_id: kept behind the piece, as StagedParked.save_checkpoint will do here.
        """
        self._stages.order(
            StageChunk(slot=slot, start=start, ids=_bytes(ids), checkpoint_id=checkpoint_id)
        )
        if checkpoint_id is not None:
            self._stages.kept_ahead.add(checkpoint_id)
        self._launched.append(self._stages.incoming(ids.shape[0]))

    def window(self, ids: Tensor, rows: Rows, state: SlotState) -> Tensor:
        """See Trunk.window."""
        if not self._launched:
            self.launch_window(ids, rows)
        return self.own.window(ids, rows, state, self._stages.wait(self._launched.popleft()))

    def chunk(self, ids: Tensor, slot: int, start: int, state: SlotState) -> Tensor:
        """See Trunk.chunk."""
        if not self._launched:
            self.launch_chunk(ids, slot, start)
        return self.own.chunk(ids, slot, start, state, self._stages.wait(self._launched.popleft()))

    def commit(self, kept: Mapping[int, KeptRows], streams: Tensor, state: SlotState) -> None:
        """See Trunk.commit."""
        self._stages.order(StageCommit(kept={slot: rows.count for slot, rows in kept.items()}))
        self.own.commit(kept, streams, state)

    def logits(self, streams: Tensor) -> Tensor:
        """See Trunk.logits."""
        return self.own.logits(streams)


class StagedParked(ParkedStates):
    """ParkedStates of the engine's own layers, which has the other stages do the same with theirs."""

    def __init__(self, state: SlotState, stages: Stages) -> None:
        """No limit of its own: the ids that are ordered are counted with the bytes of all stages."""
        super().__init__(state)
        self._stages = stages

    def save_pages(self, slot: int, pages: Sequence[tuple[int, int]]) -> None:
        self._stages.order(MovePages(slot=slot, pages=tuple(pages), to_slot=False))
        super().save_pages(slot, pages)

    def load_pages(self, slot: int, pages: Sequence[tuple[int, int]]) -> None:
        self._stages.order(MovePages(slot=slot, pages=tuple(pages), to_slot=True))
        super().load_pages(slot, pages)

    def save_checkpoint(self, checkpoint_id: int, slot: int, mark: CheckpointMark) -> None:
        if checkpoint_id in self._stages.kept_ahead:
            self._stages.kept_ahead.remove(checkpoint_id)
        else:
            order = MoveCheckpoint(checkpoint_id=checkpoint_id, slot=slot, to_slot=False)
            self._stages.order(order)
        super().save_checkpoint(checkpoint_id, slot, mark)

    def load_checkpoint(self, checkpoint_id: int, slot: int) -> CheckpointMark:
        self._stages.order(MoveCheckpoint(checkpoint_id=checkpoint_id, slot=slot, to_slot=True))
        return super().load_checkpoint(checkpoint_id, slot)

    def drop_page(self, page_id: int) -> None:
        self._stages.order(DropParked(page_id=page_id))
        super().drop_page(page_id)

    def drop_checkpoint(self, checkpoint_id: int) -> None:
        self._stages.order(DropParked(checkpoint_id=checkpoint_id))
        super().drop_checkpoint(checkpoint_id)


def _bytes(ids: Tensor) -> bytes:
    return ids.to("cpu", torch.int64).contiguous().numpy().tobytes()


def _load_error(name: str, failed: StageFailed) -> EngineError:
    """What the stage raised, under the same class where it is one of the engine's."""
    kind = getattr(errors, failed.kind, None)
    found = kind if isinstance(kind, type) and issubclass(kind, EngineError) else ModelLoadError
    return found(f"{name}: {failed.message}")
