"""The scripted engine: the Engine protocol without a model, for tests and for load tests of the gateway.

Its tokens are a function of (prompt ids, seed, position) alone, so whatever the schedule was, a sequence's output
must equal `expected_output`; grammars and thinking budgets have no say in it. It refuses every plan that contradicts
the slots' state, and fails where told to.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn

from engine.errors import KernelFailure, ModelLoadError, PlanError
from engine.flight import Flight, must_land_first, named_slots
from engine.interface import (
    MAX_SPEC,
    PAGE_TOKENS,
    DecodeStep,
    EngineInfo,
    FileDone,
    KeptFile,
    PrefillChunk,
    ReadFile,
    Resume,
    SamplingParams,
    SlotFailure,
    SlotStart,
    SlotTokens,
    TokenLogprobs,
    WindowPlan,
    WindowResult,
    WindowTimes,
    WriteFile,
)


class FaultKind(StrEnum):
    """How a window goes wrong."""

    ERROR = "error"
    """An exception nobody foresaw."""
    KERNEL = "kernel"
    """KernelFailure."""
    PLAN = "plan"
    """PlanError for a good plan."""
    SLOT = "slot"
    """SlotFailure of `slot`, if the window has rows of it that would give tokens."""
    GRAMMAR = "grammar"
    """... because of its grammar."""
    DIE = "die"
    """The process ends without a word."""
    HANG = "hang"
    """The window never returns (until the engine is closed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One scripted failure."""

    window: int
    """Windows are counted from 0 at load."""
    kind: FaultKind
    slot: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeScript:
    """Everything the scripted engine does; frozen, so that it crosses the process border."""

    num_slots: int = 4
    max_context: int = 4096
    chunk_tokens: int = 64
    max_draft: int = MAX_SPEC
    vocab_size: int = 8192
    page_bytes: int = 4096
    checkpoint_bytes: int = 65536
    output_ids: tuple[int, ...] = ()
    """Every sequence's output, its last id repeated for ever; empty: ids from a hash."""
    accepted: tuple[int, ...] = (4, 2, 0, 3, 1)
    """Accepted drafts of a sequence's first, second, ... decode step, round and round, cut to its max_draft."""
    prompt_token_s: float = 0.0
    num_groups: int = 1
    """More than one: results come late, as from a model that is spread over so many stages."""
    decode_s: float = 0.0
    """Per window with decode steps."""
    row_s: float = 0.0
    """Per verified row."""
    tick_s: float = 0.0
    """Windows with decode steps end at multiples of it on the monotonic clock, which clients can read as well."""
    load_s: float = 0.0
    load_error: str | None = None
    """Loading fails with a ModelLoadError that says this."""
    load_dies: bool = False
    faults: tuple[Fault, ...] = ()


def expected_output(
    script: FakeScript, prompt_ids: tuple[int, ...], sampling: SamplingParams, max_tokens: int
) -> tuple[int, ...]:
    """The whole output of a sequence: up to max_tokens ids, ended by the first stop id."""
    digest = _digest(prompt_ids)
    ids: list[int] = []
    while len(ids) < max_tokens and not (ids and ids[-1] in sampling.stop_token_ids):
        ids.append(_token(script, digest, sampling, len(ids)))
    return tuple(ids)


class FakeEngine:
    """Engine protocol over a FakeScript."""

    def __init__(
        self,
        script: FakeScript,
        *,
        die: Callable[[int], NoReturn] = os._exit,
        files: FakeFiles | None = None,
    ) -> None:
        """`die` ends the process with a status; files: the directory for conversation files, None for none."""
        self._script = script
        self._files = files
        self._die = die
        self._slots = [_FakeSlot() for _ in range(script.num_slots)]
        self._parked = _FakeParked()
        self._num_windows = 0
        self._flight: Flight[tuple[SlotTokens | SlotFailure, ...]] = Flight(script.num_groups)
        self._closed = threading.Event()
        self._closed.wait(script.load_s)
        if script.load_dies:
            die(3)
        if script.load_error is not None:
            raise ModelLoadError(script.load_error)
        self.info = EngineInfo(
            model_name="scripted",
            vocab_size=script.vocab_size,
            max_context=script.max_context,
            num_slots=script.num_slots,
            chunk_tokens=script.chunk_tokens,
            max_draft=script.max_draft,
            page_bytes=script.page_bytes,
            checkpoint_bytes=script.checkpoint_bytes,
            device="none",
            dtype="none",
            kernels="scripted tokens",
            load_s=script.load_s,
            memory_plan=(),
            keeps_files=files is not None,
            files=() if files is None else files.kept(),
        )

    def run_window(self, plan: WindowPlan) -> WindowResult:
        """Run one window of the script."""
        if self._closed.is_set():
            raise PlanError("the engine is closed")
        window = self._num_windows
        self._num_windows += 1
        faults = [fault for fault in self._script.faults if fault.window == window]
        for fault in faults:
            self._fail(fault)
        flight = self._flight
        answers: list[SlotTokens | SlotFailure] = []
        if plan == WindowPlan() and not flight.slots:
            raise PlanError("the plan has nothing to do")
        if flying := named_slots(plan).intersection(flight.slots):
            raise PlanError(f"slots {sorted(flying)}: work is planned while they are in flight")
        self._check(plan)
        if must_land_first(plan):
            while (landed := flight.next()) is not None:
                answers += landed
        done = () if self._files is None else self._files.take_done(self._parked)
        self._park(plan)
        for start in plan.starts:
            self._slots[start.slot] = _begun(start)
        slot_faults = (FaultKind.SLOT, FaultKind.GRAMMAR)
        broken = {fault.slot: fault.kind for fault in faults if fault.kind in slot_faults}
        read, decoded = tuple(self._read(plan.chunks)), tuple(self._decode(plan.decodes))
        times = self._times(plan, (*read, *decoded))
        self._closed.wait(times.prefill_s + times.draft_s + times.verify_s)
        if plan.decodes and (tick_s := self._script.tick_s):
            self._closed.wait(tick_s - time.monotonic() % tick_s)
        found = {
            t.slot: self._break(t.slot, broken[t.slot]) if t.slot in broken else t
            for t in (*read, *decoded)
        }
        for chunk in plan.chunks:
            slots = (chunk.slot,) if chunk.is_last else ()
            flight.begin(tuple(found[slot] for slot in slots), slots)
        for steps in flight.groups(plan.decodes):
            flight.begin(tuple(found[s.slot] for s in steps), [s.slot for s in steps])
        while (landed := flight.next_due(answered=bool(answers))) is not None:
            answers += landed
        return WindowResult(
            tokens=tuple(a for a in answers if isinstance(a, SlotTokens)),
            failures=tuple(a for a in answers if isinstance(a, SlotFailure)),
            times=times,
            files=done,
            in_flight=flight.slots,
        )

    def parked_ids(self) -> tuple[frozenset[int], frozenset[int]]:
        """Pages and checkpoints that are there."""
        return frozenset(self._parked.pages), frozenset(self._parked.checkpoints)

    def work_ahead(self) -> None:
        """Nothing can be prepared."""

    def close(self) -> None:
        """Let a hanging window go; refuse all later ones."""
        self._closed.set()

    def _fail(self, fault: Fault) -> None:
        message = f"scripted {fault.kind} in window {fault.window}"
        match fault.kind:
            case FaultKind.ERROR:
                raise RuntimeError(message)
            case FaultKind.KERNEL:
                raise KernelFailure(message)
            case FaultKind.PLAN:
                raise PlanError(message)
            case FaultKind.DIE:
                self._die(3)
            case FaultKind.HANG:
                self._closed.wait()
            case FaultKind.SLOT | FaultKind.GRAMMAR:
                pass

    def _break(self, slot: int, kind: FaultKind) -> SlotFailure:
        self._slots[slot] = _FakeSlot()
        is_grammar = kind is FaultKind.GRAMMAR
        return SlotFailure(slot=slot, message=f"scripted {kind} failure", is_grammar=is_grammar)

    def _check(self, plan: WindowPlan) -> None:
        """Everything that the interface says about a plan; nothing has been changed when this raises."""
        self._check_parking(plan)
        num_slots = self._script.num_slots
        used = [item.slot for item in (*plan.chunks, *plan.decodes)]
        started = [start.slot for start in plan.starts]
        for slots, what in ((used, "chunks and decodes"), (started, "starts")):
            if len(set(slots)) != len(slots):
                raise PlanError(f"a slot appears twice in {what}: {slots}")
            if any(not 0 <= slot < num_slots for slot in slots):
                raise PlanError(f"{what} use slots {slots}; there are {num_slots}")
        if idle := set(started) - set(used):
            raise PlanError(f"slots {sorted(idle)} are started without work")
        slots = dict(enumerate(self._slots))
        for start in plan.starts:
            if start.resume is not None:
                self._parked.check_resume(start.slot, start.resume, plan)
            slots[start.slot] = _begun(start)
        for chunk in plan.chunks:
            self._check_chunk(chunk, slots[chunk.slot])
        for step in plan.decodes:
            self._check_step(step, slots[step.slot])

    def _check_parking(self, plan: WindowPlan) -> None:
        parked = self._parked
        kept = [chunk.checkpoint_id for chunk in plan.chunks if chunk.checkpoint_id is not None]
        read = [i for order in plan.reads for i in order.checkpoint_ids]
        new_checkpoints = [*(suspend.checkpoint_id for suspend in plan.suspends), *kept, *read]
        new_pages = [save.page_id for save in plan.saves]
        new_pages += [i for order in plan.reads for i in order.page_ids]
        _check_ids("pages", plan.drop_page_ids, new_pages, parked.pages)
        _check_ids("checkpoints", plan.drop_checkpoint_ids, new_checkpoints, parked.checkpoints)
        num_slots = self._script.num_slots
        slots = [*(suspend.slot for suspend in plan.suspends), *(save.slot for save in plan.saves)]
        if any(not 0 <= slot < num_slots for slot in slots):
            raise PlanError(f"slots {slots} are parked; there are {num_slots}")
        for suspend in plan.suspends:
            if not self._slots[suspend.slot].prompt_done:
                raise PlanError(f"slot {suspend.slot}: suspended before its prompt was read")
        for save in plan.saves:
            computed = len(self._slots[save.slot].computed_ids())
            if not 0 <= save.index * PAGE_TOKENS < computed:
                raise PlanError(f"slot {save.slot}: page {save.index} of {computed} tokens saved")

    def _park(self, plan: WindowPlan) -> None:
        parked = self._parked
        for page_id in plan.drop_page_ids:
            del parked.pages[page_id]
        for checkpoint_id in plan.drop_checkpoint_ids:
            del parked.checkpoints[checkpoint_id]
        for suspend in plan.suspends:
            parked.checkpoints[suspend.checkpoint_id] = self._slots[suspend.slot].checkpoint()
        cells = {slot: self._slots[slot].computed_ids() for slot in {s.slot for s in plan.saves}}
        for save in plan.saves:
            parked.pages[save.page_id] = cells[save.slot]
        if self._files is not None:
            self._files.begin(plan, parked)

    def _check_chunk(self, chunk: PrefillChunk, slot: _FakeSlot) -> None:
        where = f"chunk of slot {chunk.slot}"
        chunk_tokens = self._script.chunk_tokens
        end = chunk.start + len(chunk.token_ids)
        if slot.sampling is None:
            raise PlanError(f"{where}: the slot was not started")
        if slot.prompt_done:
            raise PlanError(f"{where}: the prompt is already read")
        if chunk.start != slot.num_computed:
            raise PlanError(f"{where}: starts at {chunk.start}, computed are {slot.num_computed}")
        if not chunk.token_ids:
            raise PlanError(f"{where}: it is empty")
        if chunk.start // chunk_tokens != (end - 1) // chunk_tokens:
            raise PlanError(f"{where}: [{chunk.start}, {end}) crosses a multiple of {chunk_tokens}")
        if end >= self._script.max_context:
            raise PlanError(f"{where}: ends at {end}, the context is {self._script.max_context}")
        if any(not 0 <= token_id < self._script.vocab_size for token_id in chunk.token_ids):
            raise PlanError(f"{where}: a token id is outside 0 to {self._script.vocab_size - 1}")

    def _check_step(self, step: DecodeStep, slot: _FakeSlot) -> None:
        where = f"decode of slot {step.slot}"
        if not slot.prompt_done:
            raise PlanError(f"{where}: its prompt is not read")
        if slot.ended:
            raise PlanError(f"{where}: the sequence ended with a stop id")
        if not 0 <= step.max_draft <= self._script.max_draft:
            raise PlanError(
                f"{where}: max_draft {step.max_draft} is outside 0 to {self._script.max_draft}"
            )
        if step.max_draft > 0 and not slot.uses_drafts:
            raise PlanError(f"{where}: {step.max_draft} drafts of a sequence started without")
        if not 0.0 <= step.spec_min_p <= 1.0:
            raise PlanError(f"{where}: spec_min_p {step.spec_min_p} is outside 0 to 1")
        end = slot.num_computed + 1 + step.max_draft
        if end > self._script.max_context:
            raise PlanError(f"{where}: rows to {end}, the context is {self._script.max_context}")

    def _read(self, chunks: tuple[PrefillChunk, ...]) -> Iterator[SlotTokens]:
        for chunk in chunks:
            slot = self._slots[chunk.slot]
            slot.prompt_ids += chunk.token_ids
            slot.num_computed += len(chunk.token_ids)
            if chunk.checkpoint_id is not None:
                self._parked.checkpoints[chunk.checkpoint_id] = slot.checkpoint()
            if chunk.is_last:
                slot.prompt_done = True
                slot.digest = _digest(slot.prompt_ids)
                yield self._produce(chunk.slot, num_drafted=0, num_accepted=0)

    def _decode(self, steps: tuple[DecodeStep, ...]) -> Iterator[SlotTokens]:
        for step in steps:
            slot = self._slots[step.slot]
            accepted = self._script.accepted
            wanted = accepted[slot.num_steps % len(accepted)] if accepted else 0
            num_accepted = min(step.max_draft, wanted)
            gated = step.spec_min_p > 0.0
            num_drafted = min(step.max_draft, num_accepted + 1) if gated else step.max_draft
            slot.num_steps += 1
            slot.num_computed += num_accepted + 1
            yield self._produce(step.slot, num_drafted=num_drafted, num_accepted=num_accepted)

    def _produce(self, index: int, *, num_drafted: int, num_accepted: int) -> SlotTokens:
        slot = self._slots[index]
        sampling = slot.sampling
        assert sampling is not None
        ids: list[int] = []
        while len(ids) < num_accepted + 1 and not slot.ended:
            ids.append(_token(self._script, slot.digest, sampling, len(slot.output_ids)))
            slot.output_ids.append(ids[-1])
            slot.ended = ids[-1] in sampling.stop_token_ids
        return SlotTokens(
            slot=index,
            token_ids=tuple(ids),
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            logprobs=self._logprobs(ids, sampling),
        )

    def _logprobs(
        self, ids: list[int], sampling: SamplingParams
    ) -> tuple[TokenLogprobs, ...] | None:
        if sampling.top_logprobs is None:
            return None
        vocab_size = self._script.vocab_size
        ranks = range(sampling.top_logprobs)
        return tuple(
            TokenLogprobs(
                logprob=-0.5,
                top=tuple(((token_id + rank) % vocab_size, -0.5 - rank) for rank in ranks),
            )
            for token_id in ids
        )

    def _times(self, plan: WindowPlan, produced: tuple[SlotTokens, ...]) -> WindowTimes:
        script = self._script
        decoding = {step.slot for step in plan.decodes}
        rows = sum(1 + tokens.num_drafted for tokens in produced if tokens.slot in decoding)
        return WindowTimes(
            prefill_s=script.prompt_token_s * sum(len(chunk.token_ids) for chunk in plan.chunks),
            draft_s=0.0,
            verify_s=(script.decode_s if plan.decodes else 0.0) + script.row_s * rows,
        )


@dataclass(slots=True, kw_only=True)
class _FakeSlot:
    sampling: SamplingParams | None = None
    uses_drafts: bool = True
    prompt_ids: tuple[int, ...] = ()
    digest: bytes = field(default=b"", repr=False)
    num_computed: int = 0
    prompt_done: bool = False
    output_ids: list[int] = field(default_factory=list[int])
    num_steps: int = 0
    ended: bool = False

    def computed_ids(self) -> tuple[int, ...]:
        """The ids whose cells it has."""
        return (*self.prompt_ids, *self.output_ids[:-1])

    def checkpoint(self) -> _FakeCheckpoint:
        return _FakeCheckpoint(prompt_ids=self.prompt_ids, output_ids=tuple(self.output_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class _FakeCheckpoint:
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    """Empty: of a prompt piece."""

    @property
    def num_computed(self) -> int:
        return len(self.prompt_ids) + max(0, len(self.output_ids) - 1)


class _FakeParked:
    """What pages and checkpoints hold: the ids they were computed from."""

    def __init__(self) -> None:
        self.pages: dict[int, tuple[int, ...]] = {}
        """All ids of the slot a page was saved from."""
        self.checkpoints: dict[int, _FakeCheckpoint] = {}

    def check_resume(self, slot: int, resume: Resume, plan: WindowPlan) -> None:
        """Raises PlanError unless all of it is there before the plan and after its drops, and of these very ids."""
        where = f"slot {slot}"
        checkpoint = self.checkpoints.get(resume.checkpoint_id)
        if checkpoint is None or resume.checkpoint_id in plan.drop_checkpoint_ids:
            raise PlanError(f"{where}: checkpoint {resume.checkpoint_id} is not parked")
        ids = (*checkpoint.prompt_ids, *checkpoint.output_ids)
        computed = checkpoint.num_computed
        goes_on = resume.token_ids == ids and resume.num_output == len(checkpoint.output_ids)
        is_prompt = resume.token_ids == ids[:computed] and resume.num_output == 0
        if not (goes_on or is_prompt):
            raise PlanError(f"{where}: the checkpoint is of other tokens")
        if len(resume.page_ids) != -(-computed // PAGE_TOKENS):
            raise PlanError(f"{where}: {len(resume.page_ids)} pages for {computed} tokens")
        for index, page_id in enumerate(resume.page_ids):
            end = min(computed, (index + 1) * PAGE_TOKENS)
            if page_id not in self.pages or page_id in plan.drop_page_ids:
                raise PlanError(f"{where}: page {page_id} is not parked")
            if self.pages[page_id][:end] != ids[:end]:
                raise PlanError(f"{where}: page {page_id} is of other tokens")


@dataclass(slots=True, kw_only=True)
class FakeFile:
    """A conversation file, as what its pages and checkpoints were computed from."""

    kept: KeptFile
    pages: tuple[tuple[int, ...], ...]
    checkpoints: tuple[_FakeCheckpoint, ...]
    is_damaged: bool = False


class FakeFiles:
    """A directory of conversation files, which outlives the engines that use it. Work takes until the next window."""

    def __init__(self) -> None:
        self.files: dict[str, FakeFile] = {}
        self.is_full = False
        self._writes: list[WriteFile] = []
        self._reads: list[ReadFile] = []

    def kept(self) -> tuple[KeptFile, ...]:
        """What a new engine finds; the work of the last one that was not done is lost."""
        self._writes.clear()
        self._reads.clear()
        return tuple(file.kept for file in self.files.values())

    def begin(self, plan: WindowPlan, parked: _FakeParked) -> None:
        for file_id in plan.drop_file_ids:
            if self.files.pop(file_id, None) is None:
                raise PlanError(f"file {file_id}: no such file is deleted")
        for order in plan.writes:
            self._check(order, order.page_ids, order.checkpoint_ids)
            self._writes.append(order)
        for order in plan.reads:
            self._check(order, order.page_ids, order.checkpoint_ids)
            parked.pages |= dict.fromkeys(order.page_ids, ())
            parked.checkpoints |= dict.fromkeys(order.checkpoint_ids, _UNREAD)
            self._reads.append(order)

    def take_done(self, parked: _FakeParked) -> tuple[FileDone, ...]:
        done = [self._write(order, parked) for order in self._writes]
        done += [self._read(order, parked) for order in self._reads]
        self._writes.clear()
        self._reads.clear()
        return tuple(done)

    def _check(
        self,
        order: WriteFile | ReadFile,
        page_ids: Collection[int],
        checkpoint_ids: Collection[int],
    ) -> None:
        pages = -(-order.checkpoints[-1].position // PAGE_TOKENS)
        if len(page_ids) != pages or len(checkpoint_ids) != len(order.checkpoints):
            raise PlanError(f"file {order.file_id}: pages or checkpoints do not fit the positions")

    def _write(self, order: WriteFile, parked: _FakeParked) -> FileDone:
        """The ids must have been kept until now."""
        checkpoints = tuple(parked.checkpoints[i] for i in order.checkpoint_ids)
        if [c.num_computed for c in checkpoints] != [key.position for key in order.checkpoints]:
            raise PlanError(f"file {order.file_id}: checkpoints of other positions are written")
        if not self.is_full:
            self.files[order.file_id] = FakeFile(
                kept=KeptFile(file_id=order.file_id, num_bytes=1, checkpoints=order.checkpoints),
                pages=tuple(parked.pages[i] for i in order.page_ids),
                checkpoints=checkpoints,
            )
        return FileDone(file_id=order.file_id, is_write=True, ok=not self.is_full)

    def _read(self, order: ReadFile, parked: _FakeParked) -> FileDone:
        file = self.files.get(order.file_id)
        is_good = file is not None and not file.is_damaged
        if file is not None and is_good:
            parked.pages |= zip(order.page_ids, file.pages, strict=False)
            parked.checkpoints |= zip(order.checkpoint_ids, file.checkpoints, strict=False)
        else:
            self.files.pop(order.file_id, None)
        return FileDone(file_id=order.file_id, is_write=False, ok=is_good)


_UNREAD = _FakeCheckpoint(prompt_ids=(), output_ids=())


def _begun(start: SlotStart) -> _FakeSlot:
    slot = _FakeSlot(sampling=start.sampling, uses_drafts=start.uses_drafts)
    resume = start.resume
    if resume is not None:
        first_output = len(resume.token_ids) - resume.num_output
        slot.prompt_ids = resume.token_ids[:first_output]
        slot.output_ids = list(resume.token_ids[first_output:])
        slot.prompt_done = resume.num_output > 0
        slot.num_computed = len(slot.computed_ids())
        slot.digest = _digest(slot.prompt_ids)
    return slot


def _check_ids(
    what: str, dropped: Collection[int], new: Collection[int], parked: Container[int]
) -> None:
    if len(set(dropped)) != len(dropped) or any(i not in parked for i in dropped):
        raise PlanError(f"{what} {list(dropped)} are dropped, not all of them are parked")
    if len(set(new)) != len(new) or any(i in parked for i in new):
        raise PlanError(f"{what} {list(new)}: required new ids, each once")


def _digest(prompt_ids: tuple[int, ...]) -> bytes:
    joined = b"".join(token_id.to_bytes(4, "little") for token_id in prompt_ids)
    return hashlib.blake2b(joined, digest_size=16).digest()


def _token(script: FakeScript, digest: bytes, sampling: SamplingParams, index: int) -> int:
    if script.output_ids:
        return script.output_ids[min(index, len(script.output_ids) - 1)]
    key = sampling.seed.to_bytes(8, "little")
    noise = hashlib.blake2b(digest + index.to_bytes(4, "little"), digest_size=8, key=key).digest()
    token_id = int.from_bytes(noise, "little") % script.vocab_size
    while index < sampling.min_tokens and token_id in sampling.stop_token_ids:
        token_id = (token_id + 1) % script.vocab_size
    return token_id
