"""`stratagate floor`: the time of a window's layers and nothing else, and what such a window allocates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from engine.config import DEFAULT_MODEL, KERNELS, EngineConfig, ModelParts
from engine.instruments import Allocations, StageTimer, count_allocations
from engine.interface import MAX_SLOTS, MAX_SPEC
from engine.layers.gdn import GdnLayer
from engine.loading import load_engine
from engine.state import Rows
from engine.steps import StagedSteps, TimedSteps
from engine.tools.options import (
    MODEL_HELP,
    MtpOption,
    NativeOption,
    PleGgufOption,
    number_option,
    word_option,
)

if TYPE_CHECKING:
    from engine.engine import TorchEngine

_WARM_UP = 2
_HEAD, _START = "head", "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Mean seconds of a window of `num_rows` rows and of its stages; `stages` were timed in windows of their own."""

    device: str
    kernels: str
    num_rows: int
    num_layers: int
    window_s: float
    stages: dict[str, float]
    allocations: Allocations

    def text(self) -> str:
        """Total, layers, one layer, head, then each kind of layer, in milliseconds."""
        ms = {name: 1000 * seconds for name, seconds in self.stages.items()}
        head, start = ms.pop(_HEAD), ms.pop(_START)
        layers = sum(ms.values())
        total = 1000 * self.window_s
        name = "GPU" if self.device.startswith("cuda") else "CPU"
        found = self.allocations
        return "\n".join(
            (
                f"{name} floor layers+head {total:.3f} ms per window of {self.num_rows} rows -> "
                f"{1000 * self.num_rows / total:.2f} rows/s of {name} work",
                f"{'':11} {self.kernels}",
                f"{layers:11.3f} ms layers ({self.num_layers})",
                f"{layers / self.num_layers:11.3f} ms per layer",
                f"{head:11.3f} ms LM head",
                f"{start:11.3f} ms embedding",
                *(f"{spent:11.3f} ms all {kind}" for kind, spent in ms.items()),
                f"allocations in a steady window: {found.tensors} tensors, {found.num_bytes:,} bytes, at most "
                f"{found.peak_bytes:,} together; {found.device_calls} cudaMalloc",
            )
        )


def floor(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = DEFAULT_MODEL,
    native: NativeOption = None,
    ple_gguf: PleGgufOption = None,
    mtp: MtpOption = None,
    slots: Annotated[int, number_option("--slots", "Slots in the window.", 1, MAX_SLOTS)] = 1,
    rows: Annotated[int, number_option("--rows", "Rows of each slot.", 1, MAX_SPEC + 1)] = 1,
    position: Annotated[
        int, number_option("--position", "Tokens before the window.", 0, 2**20)
    ] = 64,
    windows: Annotated[int, number_option("--windows", "Windows to time.", 1, 100_000)] = 50,
    device: Annotated[
        str, word_option("--device", "Where to run.", ("auto", "cpu", "cuda"))
    ] = "auto",
    dtype: Annotated[
        str, word_option("--dtype", "Of weights.", ("auto", "float32", "bfloat16"))
    ] = "auto",
    kernels: Annotated[str, word_option("--kernels", "Which layers.", KERNELS)] = "auto",
    threads: Annotated[int | None, number_option("--threads", "CPU threads.", 1, 1024)] = None,
) -> None:
    """Time the layers and the head of a window, without drafting, picking or scheduling."""
    engine = load_engine(
        EngineConfig(
            model=model,
            parts=ModelParts(native=native, ple_gguf=ple_gguf, mtp=mtp),
            device=device,
            dtype=dtype,
            threads=threads,
            num_slots=slots,
            max_draft=0,
            kernels=kernels,
        )
    )
    limit = engine.info.max_context - rows
    if position > limit:
        raise typer.BadParameter(
            f"--position must be at most {limit}, the context less the window; found {position}"
        )
    typer.echo(measure_floor(engine, rows=rows, position=position, windows=windows).text())
    engine.close()


@torch.inference_mode()
def measure_floor(engine: TorchEngine, *, rows: int, position: int, windows: int) -> Floor:
    """Run windows of `rows` rows in every slot at one position; what the slots held is lost."""
    trunk, state, num_slots = engine.steps, engine.state, engine.info.num_slots
    for slot in range(num_slots):
        engine.start(slot)
    layout = Rows(range(num_slots), [rows] * num_slots, [position] * num_slots, state.device)
    ids = torch.zeros(
        num_slots * rows, trunk.ngram_context + 1, dtype=torch.int64, device=state.device
    )

    def window() -> None:
        trunk.logits(trunk.window(ids, layout, state))

    for _ in range(_WARM_UP):
        window()
    whole_s = _seconds(window, windows, state.device)
    stages, num_layers = _stages(engine, ids, layout, windows)
    return Floor(
        device=engine.info.device,
        kernels=engine.info.kernels,
        num_rows=num_slots * rows,
        num_layers=num_layers,
        window_s=whole_s,
        stages={name: seconds / windows for name, seconds in stages.items()},
        allocations=count_allocations(window),
    )


def _stages(
    engine: TorchEngine, ids: torch.Tensor, layout: Rows, windows: int
) -> tuple[dict[str, float], int]:
    """Seconds of each stage of so many windows, and the number of layers."""
    trunk, state = engine.steps, engine.state
    if isinstance(trunk, TimedSteps):

        def run() -> None:
            for _ in range(windows):
                trunk.logits(trunk.window(ids, layout, state))

        found = trunk.stage_seconds(run)
        return {name: spent for name, spent in found.items() if spent}, trunk.num_layers
    timer = StageTimer(state.device)
    if isinstance(trunk, StagedSteps):
        # The first time captures them.
        _captured(trunk, layout, StageTimer(state.device))
        for _ in range(windows):
            _captured(trunk, layout, timer)
        return timer.seconds(), trunk.num_layers
    for _ in range(windows):
        _staged(engine, ids, layout, timer)
    return timer.seconds(), len(engine.trunk.layers)


def _captured(trunk: StagedSteps, layout: Rows, timer: StageTimer) -> None:
    """The same window's parts, each a graph of its own."""
    for name, run in trunk.stages(layout).items():
        with timer.stage(name):
            run()


def _staged(engine: TorchEngine, ids: torch.Tensor, layout: Rows, timer: StageTimer) -> None:
    """The same window by stages."""
    trunk, state = engine.trunk, engine.state
    with timer.stage(_START):
        fetched = trunk.fetch(ids)
        streams = trunk.start(ids)
    for layer in trunk.layers:
        kind = "GDN" if isinstance(layer.mixer, GdnLayer) else "QSA"
        with timer.stage(f"{kind} layers" if layer.ple is None else f"{kind} layers with PLE"):
            trunk.window_layer(layer, streams, fetched, layout, state)
    with timer.stage(_HEAD):
        trunk.logits(streams)


def _seconds(window: Callable[[], None], windows: int, device: torch.device) -> float:
    """Mean time back to back; on a GPU between two events, with nothing read in between."""
    if device.type == "cuda":
        timer = StageTimer(device)
        with timer.stage("all"):
            for _ in range(windows):
                window()
        return timer.seconds()["all"] / windows
    began = time.perf_counter()
    for _ in range(windows):
        window()
    return (time.perf_counter() - began) / windows
