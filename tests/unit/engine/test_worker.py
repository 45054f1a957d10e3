"""The engine process's message loop, run in a thread over a socket pair."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Iterator
from types import ModuleType

import pytest

from engine.config import EngineConfig
from engine.errors import WeightMismatch
from engine.fake import FakeEngine, FakeScript, Fault, FaultKind
from engine.interface import (
    DecodeStep,
    Engine,
    PrefillChunk,
    SamplingParams,
    SlotStart,
    WindowPlan,
)
from engine.wire import (
    Close,
    Load,
    LoadFailed,
    LogLine,
    Message,
    Ready,
    RunWindow,
    WindowDone,
    WindowFailed,
)
from engine.worker import EXIT_FAILED, EXIT_OK, Channel, _ChannelLogHandler, serve

FIRST = WindowPlan(
    starts=(SlotStart(slot=0, sampling=SamplingParams()),),
    chunks=(PrefillChunk(slot=0, start=0, token_ids=(1, 2), is_last=True),),
)
NEXT = WindowPlan(decodes=(DecodeStep(slot=0, max_draft=2, spec_min_p=0.5),))


class Worker:
    """`serve` in a thread, and our end of its socket."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._sockets = (ours, theirs)
        self.status: int | None = None
        self._thread = threading.Thread(target=self._run, args=(Channel(theirs),))
        self._thread.start()

    def ask(self, message: Message) -> Message | None:
        self.channel.send(message)
        return self.channel.receive()

    def join(self) -> int | None:
        self._thread.join(5.0)
        return self.status

    def hang_up(self) -> None:
        self._sockets[0].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        self._thread.join(5.0)
        for sock in self._sockets:
            sock.close()

    def _run(self, channel: Channel) -> None:
        self.status = serve(channel)


@pytest.fixture
def worker() -> Iterator[Worker]:
    running = Worker()
    yield running
    running.close()


def load(*faults: Fault) -> Load:
    return Load(config=EngineConfig(), scripted=FakeScript(faults=faults))


def test_load_run_close(worker: Worker) -> None:
    ready = worker.ask(load())
    assert isinstance(ready, Ready)
    assert ready.info.num_slots == 4
    assert isinstance(worker.ask(RunWindow(plan=FIRST)), WindowDone)
    assert isinstance(worker.ask(RunWindow(plan=NEXT)), WindowDone)
    worker.channel.send(Close())
    assert worker.join() == EXIT_OK


def test_a_bad_plan_is_answered_and_survived(worker: Worker) -> None:
    worker.ask(load())
    failed = worker.ask(RunWindow(plan=NEXT))
    assert isinstance(failed, WindowFailed)
    assert (failed.kind, failed.fatal) == ("PlanError", False)
    assert isinstance(worker.ask(RunWindow(plan=FIRST)), WindowDone)


@pytest.mark.parametrize(
    ("kind", "name"), [(FaultKind.KERNEL, "KernelFailure"), (FaultKind.ERROR, "RuntimeError")]
)
def test_any_other_error_ends_the_process(worker: Worker, kind: FaultKind, name: str) -> None:
    worker.ask(load(Fault(window=0, kind=kind)))
    failed = worker.ask(RunWindow(plan=FIRST))
    assert failed == WindowFailed(
        kind=name, message=f"scripted {kind.value} in window 0", fatal=True
    )
    assert worker.join() == EXIT_FAILED


def test_the_engine_works_ahead_when_a_window_is_answered(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, ahead = threading.Event(), threading.Event()

    def work_ahead(_: FakeEngine) -> None:
        if answered.wait(5.0):
            ahead.set()

    monkeypatch.setattr(FakeEngine, "work_ahead", work_ahead)
    worker.ask(load())
    assert isinstance(worker.ask(RunWindow(plan=FIRST)), WindowDone)
    answered.set()
    assert ahead.wait(5.0)


def test_work_ahead_that_fails_ends_the_process(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work_ahead(_: FakeEngine) -> None:
        raise RuntimeError("too far")

    monkeypatch.setattr(FakeEngine, "work_ahead", work_ahead)
    worker.ask(load())
    assert isinstance(worker.ask(RunWindow(plan=FIRST)), WindowDone)
    failed = worker.channel.receive()
    assert failed == WindowFailed(kind="RuntimeError", message="too far", fatal=True)
    assert worker.join() == EXIT_FAILED


def test_a_failed_load_ends_the_process(worker: Worker) -> None:
    answer = worker.ask(Load(config=EngineConfig(), scripted=FakeScript(load_error="too large")))
    assert answer == LoadFailed(kind="ModelLoadError", message="too large")
    assert worker.join() == EXIT_FAILED


def test_a_lost_parent_ends_the_process(worker: Worker) -> None:
    worker.ask(load())
    worker.hang_up()
    assert worker.join() == EXIT_OK


@pytest.mark.parametrize("first", [Close(), RunWindow(plan=FIRST)])
def test_the_first_message_must_be_a_load(worker: Worker, first: Message) -> None:
    worker.channel.send(first)
    assert worker.join() == EXIT_FAILED


def test_a_second_load_is_an_error(worker: Worker) -> None:
    worker.ask(load())
    worker.channel.send(load())
    assert worker.join() == EXIT_FAILED


def fake_module(outcome: Engine | Exception) -> ModuleType:
    def load_engine(config: EngineConfig, *, rehearse: bool, on_lost: object) -> Engine:
        assert config.model == "somewhere" and rehearse and on_lost is not None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    module = ModuleType("engine.loading")
    module.load_engine = load_engine  # type: ignore[attr-defined]
    return module


def test_without_a_script_the_real_engine_is_loaded(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "engine.loading", fake_module(FakeEngine(FakeScript())))
    assert isinstance(
        worker.ask(Load(config=EngineConfig(model="somewhere"), scripted=None)), Ready
    )


def test_the_real_engines_errors_keep_their_names(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "engine.loading", fake_module(WeightMismatch("w: 1, 2")))
    answer = worker.ask(Load(config=EngineConfig(model="somewhere"), scripted=None))
    assert answer == LoadFailed(kind="WeightMismatch", message="w: 1, 2")


def test_log_records_cross_as_messages() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handler = _ChannelLogHandler(Channel(theirs))
        record = logging.LogRecord("engine", logging.INFO, "", 0, "loaded %d", (3,), None)
        handler.emit(record)
        assert Channel(ours).receive() == LogLine(level=logging.INFO, text="loaded 3")
