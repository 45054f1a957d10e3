"""The torch engine: reads prompts, drafts, verifies, accepts, commits. Owns the slots' tensors; knows no requests.

Implements engine.interface.Engine. One thread calls it, for its whole life.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.acceptance import accept
from engine.errors import PlanError
from engine.flight import Flight, must_land_first, named_slots
from engine.grammar import Constraint, GrammarCompiler, GrammarError
from engine.instruments import count_allocations
from engine.interface import (
    PAGE_TOKENS,
    DecodeStep,
    EngineInfo,
    FileDone,
    PrefillChunk,
    Resume,
    SamplingParams,
    SlotFailure,
    SlotStart,
    SlotTokens,
    TokenLogprobs,
    WindowPlan,
    WindowResult,
    WindowTimes,
)
from engine.linear import MAX_WINDOW_ROWS
from engine.memory_plan import Step
from engine.model import Trunk
from engine.parked import CheckpointMark, ParkedStates
from engine.sampling import PickRow, TokenHistory, row_logprobs
from engine.stage_wire import BeginSlot, ClearSlot
from engine.stages import StagedTrunk
from engine.state import KeptRows, Rows, SlotState
from engine.steps import WindowWork

if TYPE_CHECKING:
    from engine.experts import ExpertStore
    from engine.model_spec import ModelSpec
    from engine.parked_files import ParkedFiles
    from engine.sampling import RowPicker
    from engine.stages import Stages
    from engine.startup import StartupMarks
    from engine.steps import DraftChain, DraftSteps, TrunkSteps, WholeWindow


@dataclass(slots=True)
class SlotSequence:
    """What the engine knows of the sequence in a slot.

    ids: every known id; while reading, those read; while decoding, the last one is picked but not computed yet.
    num_draft_cells: cells of the draft layer made from the trunk's streams; the streams of positions
    [num_draft_cells, num_computed) wait in SlotState.pending.
    """

    params: SamplingParams
    uses_drafts: bool
    history: TokenHistory | None
    stop_ids: frozenset[int]
    constraint: Constraint | None = None
    failure: str | None = None
    """Why it can have no output."""
    ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_output: int = 0
    num_draft_cells: int = 0
    is_plain: bool = False
    """A WholeWindow may run it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One drafted id and its probability among what the draft layer might have picked (see RowPicker)."""

    token_id: int
    probability: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A prompt piece that is begun. ids: int64 [T, context + 1], on the host; end: computed positions behind it."""

    chunk: PrefillChunk
    ids: Tensor
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """A verify window that is begun. flat: int64 [R, context + 1]; offsets: first flat row of each slot."""

    rows: Rows
    flat: Tensor
    offsets: Mapping[int, int]
    ids: Mapping[int, tuple[int, ...]]


@dataclass(slots=True)
class _Answers:
    """What the next result has."""

    tokens: list[SlotTokens] = field(default_factory=list[SlotTokens])
    failures: list[SlotFailure] = field(default_factory=list[SlotFailure])
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether nobody is answered yet."""
        return not self.tokens and not self.failures

    def times(self) -> WindowTimes:
        """Of the work that was done for them in the engine's own process."""
        return WindowTimes(prefill_s=self.prefill_s, draft_s=self.draft_s, verify_s=self.verify_s)


class _IdBuffers:
    """Where the ids of a window's rows are put together on the host; each call overwrites what the last one gave."""

    def __init__(self, context: int) -> None:
        self._window = torch.zeros(MAX_WINDOW_ROWS, context + 1, dtype=torch.int64)
        self._next = torch.zeros(MAX_WINDOW_ROWS, dtype=torch.int64)
        # A tensor is written to row by row ten times as fast through numpy.
        self._window_rows, self._next_rows = self._window.numpy(), self._next.numpy()

    def window_ids(self, rows: Iterable[Sequence[int]]) -> Tensor:
        """int64 [R, context + 1]."""
        count = 0
        for ids in rows:
            self._window_rows[count] = ids
            count += 1
        return self._window[:count]

    def next_ids(self, ids: Sequence[int]) -> Tensor:
        """int64 [R]."""
        self._next_rows[: len(ids)] = ids
        return self._next[: len(ids)]


class TorchEngine:
    """See engine.interface.Engine."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        trunk: TrunkSteps,
        draft: DraftSteps | None,
        chain: DraftChain | None,
        experts: ExpertStore | None,
        state: SlotState,
        picker: RowPicker,
        grammars: GrammarCompiler,
        info: EngineInfo,
        parked: ParkedStates,
        files: ParkedFiles | None,
        stages: Stages | None = None,
        whole: WholeWindow | None = None,
    ) -> None:
        """chain: drafts whole chains where it can; without it every draft is picked by `picker`.

        whole: runs windows in one go where it can; without it they are put together of the other parts.
        stages: the others, if the model's layers are spread over several; then `trunk` is a StagedTrunk.
        """
        self._spec = spec
        self._trunk = trunk
        self._draft_layer = draft
        self._chain = chain
        self._experts = experts
        self._state = state
        self._picker = picker
        self._grammars = grammars
        self._parked = parked
        self._files = files
        self._stages = stages
        self._whole = whole
        self._next_steps: list[DecodeStep] = []
        """Of slots that will likely decode again."""
        self._info = replace(
            info,
            page_bytes=parked.page_bytes + (0 if stages is None else stages.page_bytes),
            checkpoint_bytes=parked.checkpoint_bytes
            + (0 if stages is None else stages.checkpoint_bytes),
            keeps_files=files is not None,
            files=() if files is None else files.kept,
        )
        self._device = state.device
        self._slots: list[SlotSequence | None] = [None] * info.num_slots
        self._unverified: tuple[_Window, Tensor] | None = None
        self._buffers = _IdBuffers(trunk.ngram_context)
        self._flight: Flight[_Piece | _Window] = Flight(1 if stages is None else stages.count)
        self._answers = _Answers()

    @property
    def info(self) -> EngineInfo:
        """Facts of the loaded model."""
        return self._info

    def close(self) -> None:
        """Forget every sequence and let go of the files; memory goes with the process."""
        if self._files is not None:
            self._files.close()
        if self._stages is not None:
            self._stages.close()
        self._slots = [None] * self._info.num_slots
        if self._experts is not None:
            self._experts.close()

    @property
    def experts(self) -> ExpertStore | None:
        """The trunk's experts where they are held one by one."""
        return self._experts

    @property
    def trunk(self) -> Trunk:
        """The torch layers, for instruments. Raises PlanError where a compiled step runs, which has none to show."""
        if not isinstance(self._trunk, Trunk):
            raise PlanError("a compiled step has no layers to look at: load with kernels torch")
        return self._trunk

    def sequence_ids(self, slot: int) -> tuple[int, ...]:
        """Every id known of the sequence in a slot, for instruments. Raises PlanError without one."""
        return tuple(self._sequence(slot).ids)

    @property
    def steps(self) -> TrunkSteps:
        """What computes, for instruments."""
        return self._trunk

    @property
    def state(self) -> SlotState:
        """What the slots hold, for instruments."""
        return self._state

    @torch.inference_mode()
    def rehearse(self, marks: StartupMarks) -> None:
        """Read a prompt piece where a context ends, and run a window there, in an empty slot; compare with the plan."""
        self.start(0)
        num_rows = min(self._info.chunk_tokens, self._info.max_context)
        first = self._info.max_context - num_rows
        ids = torch.zeros(num_rows, self._trunk.ngram_context + 1, dtype=torch.int64)
        rows = Rows([0], [1], [self._info.max_context - 1], self._device)
        state = self._state

        def read() -> None:
            if isinstance(self._trunk, StagedTrunk):
                # As many pieces as may be on their way from one stage to the next.
                for _ in range(self._flight.num_groups):
                    self._trunk.launch_chunk(ids, 0, first)
                for _ in range(self._flight.num_groups - 1):
                    self._trunk.chunk(ids, 0, first, state)
            self._trunk.chunk(ids, 0, first, state)

        # Methods of products are chosen when they are first needed, by products that are never made again.
        read()
        for step, run in (
            (Step.PROMPT, read),
            (Step.VERIFIER, lambda: self._trunk.logits(self._trunk.window(ids[:1], rows, state))),
        ):
            marks.reach(step, passing_bytes=count_allocations(run).peak_bytes)
        self._slots[0] = None

    def run_window(self, plan: WindowPlan) -> WindowResult:
        """Run one window. Raises PlanError, before anything is run, for a plan that contradicts the slots' state."""
        self._next_steps.clear()
        if self._whole is not None and _only_decodes(plan):
            self._check_decodes(plan.decodes)
            if all([self._is_plain(step.slot) for step in plan.decodes]):  # noqa: C419
                return self._run_whole(plan.decodes, self._whole)
        return self._run_parts(plan)

    def work_ahead(self) -> None:
        """Draft for the slots that the last window has not ended, if it was run in one go."""
        if self._whole is None or not self._next_steps:
            return
        works = [self._work(self._step_ahead(step)) for step in self._next_steps]
        self._whole.ahead(works)

    def _step_ahead(self, step: DecodeStep) -> DecodeStep:
        """What the slot will likely do after this step, within what it may."""
        room = self._info.max_context - len(self._sequence(step.slot).ids)
        most = max(0, min(step.next_draft, self._info.max_draft, room))
        return DecodeStep(slot=step.slot, max_draft=most, spec_min_p=step.spec_min_p)

    def _is_plain(self, slot: int) -> bool:
        """Whether a WholeWindow can run the slot's sequence."""
        sequence = self._sequence(slot)
        return sequence.is_plain and sequence.num_output >= sequence.params.min_tokens

    def _run_whole(self, steps: Sequence[DecodeStep], whole: WholeWindow) -> WindowResult:
        tokens: list[SlotTokens] = []
        failures: list[SlotFailure] = []
        yields, times = whole.run([self._work(step) for step in steps])
        for step, found in zip(steps, yields, strict=True):
            slot = step.slot
            sequence = self._sequence(slot)
            if sequence.uses_drafts:
                sequence.num_draft_cells = sequence.num_computed
            if found.token_ids is None:
                failures.append(self._not_finite(slot))
                continue
            num_tokens = len(found.token_ids)
            sequence.ids += found.token_ids
            sequence.num_output += num_tokens
            sequence.num_computed += num_tokens
            tokens.append(
                SlotTokens(
                    slot=slot,
                    token_ids=found.token_ids,
                    num_drafted=found.num_drafted,
                    num_accepted=found.num_accepted,
                    logprobs=None,
                )
            )
            if sequence.uses_drafts and found.token_ids[-1] not in sequence.stop_ids:
                self._next_steps.append(step)
        return WindowResult(
            tokens=tuple(tokens),
            failures=tuple(failures),
            times=times,
            files=self._finish_files(wait=False),
        )

    def _work(self, step: DecodeStep) -> WindowWork:
        self._parked.wait(step.slot)
        sequence = self._sequence(step.slot)
        computed = sequence.num_computed
        pending = computed - sequence.num_draft_cells if sequence.uses_drafts else None
        return WindowWork(step, sequence.ids, computed, pending)

    @torch.inference_mode()
    def _run_parts(self, plan: WindowPlan) -> WindowResult:
        flight = self._flight
        if flying := named_slots(plan).intersection(flight.slots):
            raise PlanError(f"slots {sorted(flying)}: work is planned while they are in flight")
        if must_land_first(plan):
            while (work := flight.next()) is not None:
                self._finish(work)
        self._check(plan)
        self._park(plan)
        for start in plan.starts:
            self._begin(start)
        for chunk in plan.chunks:
            flight.begin(self._begin_piece(chunk), (chunk.slot,) if chunk.is_last else ())
        for steps in flight.groups(plan.decodes):
            flight.begin(self._begin_decode(steps), [step.slot for step in steps])
        while (work := flight.next_due(answered=not self._answers.is_empty)) is not None:
            self._finish(work)
        answers, self._answers = self._answers, _Answers()
        return WindowResult(
            tokens=tuple(answers.tokens),
            failures=tuple(answers.failures),
            times=answers.times(),
            files=self._finish_files(wait=plan.waits_for_files),
            in_flight=flight.slots,
        )

    def _finish(self, work: _Piece | _Window) -> None:
        began = time.perf_counter()
        if isinstance(work, _Piece):
            self._finish_piece(work)
            self._answers.prefill_s += time.perf_counter() - began
        else:
            self._finish_decode(work)
            self._answers.verify_s += time.perf_counter() - began

    # Checks

    def _check(self, plan: WindowPlan) -> None:
        starting = {start.slot: start for start in plan.starts}
        if len(starting) != len(plan.starts):
            raise PlanError("a slot is started twice in one plan")
        self._check_parking(plan)
        for start in plan.starts:
            self._check_start(start)
        _check_distinct([work.slot for work in (*plan.chunks, *plan.decodes)])
        for chunk in plan.chunks:
            self._check_chunk(chunk, starting)
        for step in plan.decodes:
            self._check_decode(step, starting)

    def _check_decodes(self, steps: Sequence[DecodeStep]) -> None:
        """Of a plan with nothing else."""
        _check_distinct([step.slot for step in steps])
        for step in steps:
            self._check_decode(step, {})

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self._info.num_slots:
            raise PlanError(f"slot {slot}: required 0 to {self._info.num_slots - 1}")

    def _check_parking(self, plan: WindowPlan) -> None:
        parked = self._parked
        for page_id in plan.drop_page_ids:
            if not parked.has_page(page_id):
                raise PlanError(f"page {page_id}: no such page is parked")
        for checkpoint_id in plan.drop_checkpoint_ids:
            if not parked.has_checkpoint(checkpoint_id):
                raise PlanError(f"checkpoint {checkpoint_id}: no such checkpoint is parked")
        new_checkpoints = [s.checkpoint_id for s in plan.suspends]
        new_checkpoints += [i for read in plan.reads for i in read.checkpoint_ids]
        new_checkpoints += [c.checkpoint_id for c in plan.chunks if c.checkpoint_id is not None]
        taken = [i for i in new_checkpoints if parked.has_checkpoint(i)]
        if taken or len(set(new_checkpoints)) != len(new_checkpoints):
            raise PlanError(f"checkpoints {new_checkpoints}: required new ids, each once")
        new_pages = [save.page_id for save in plan.saves]
        new_pages += [i for read in plan.reads for i in read.page_ids]
        if len(set(new_pages)) != len(new_pages) or any(map(parked.has_page, new_pages)):
            raise PlanError(f"pages {new_pages}: required new ids, each once")
        parked.check_room(
            num_pages=len(new_pages) - len(plan.drop_page_ids),
            num_checkpoints=len(new_checkpoints) - len(plan.drop_checkpoint_ids),
        )
        self._check_files(plan, frozenset(new_pages))
        for suspend in plan.suspends:
            sequence = self._sequence(suspend.slot)
            if len(sequence.ids) != sequence.num_computed + 1:
                raise PlanError(f"slot {suspend.slot}: suspended before its prompt was read")
        for save in plan.saves:
            computed = self._sequence(save.slot).num_computed
            if not 0 <= save.index * PAGE_TOKENS < computed:
                raise PlanError(
                    f"slot {save.slot}: page {save.index} saved, required to begin below {computed} tokens"
                )

    def _check_files(self, plan: WindowPlan, new_pages: frozenset[int]) -> None:
        if not (plan.writes or plan.reads or plan.drop_file_ids):
            return
        if self._files is None:
            raise PlanError("file work, but there is no directory for conversation files")
        for order in (*plan.writes, *plan.reads):
            pages = -(-order.checkpoints[-1].position // PAGE_TOKENS)
            if len(order.page_ids) != pages or len(order.checkpoint_ids) != len(order.checkpoints):
                raise PlanError(
                    f"file {order.file_id}: {len(order.page_ids)} pages and {len(order.checkpoint_ids)} checkpoints, "
                    f"required {pages} and {len(order.checkpoints)}"
                )
        suspended = {suspend.checkpoint_id: suspend.slot for suspend in plan.suspends}
        for order in plan.writes:
            missing = [
                i for i in order.page_ids if not self._parked.has_page(i) and i not in new_pages
            ]
            if missing:
                raise PlanError(f"file {order.file_id}: pages {missing} are not parked")
            for key, checkpoint_id in zip(order.checkpoints, order.checkpoint_ids, strict=True):
                if checkpoint_id in suspended:
                    found = self._sequence(suspended[checkpoint_id]).num_computed
                else:
                    found = self._parked.mark(checkpoint_id).num_computed
                if found != key.position:
                    raise PlanError(
                        f"file {order.file_id}: checkpoint {checkpoint_id} is at {found}, required {key.position}"
                    )

    def _check_start(self, start: SlotStart) -> None:
        self._check_slot(start.slot)
        resume = start.resume
        if resume is None:
            return
        mark = self._parked.mark(resume.checkpoint_id)
        needed = -(-mark.num_computed // PAGE_TOKENS)
        if len(resume.page_ids) != needed:
            raise PlanError(
                f"slot {start.slot}: {len(resume.page_ids)} pages, required {needed} for {mark.num_computed} tokens"
            )
        missing = [i for i in resume.page_ids if not self._parked.has_page(i)]
        if missing:
            raise PlanError(f"slot {start.slot}: pages {missing} are not parked")
        required = mark.num_computed + (1 if resume.num_output else 0)
        if len(resume.token_ids) != required:
            raise PlanError(
                f"slot {start.slot}: {len(resume.token_ids)} token ids resumed, required {required}"
            )

    def _known(self, slot: int, starting: Mapping[int, SlotStart]) -> tuple[int, int]:
        """Known ids and computed positions that a slot will have once the plan's starts are applied."""
        if slot not in starting:
            sequence = self._sequence(slot)
            return len(sequence.ids), sequence.num_computed
        resume = starting[slot].resume
        if resume is None:
            return 0, 0
        return len(resume.token_ids), self._parked.mark(resume.checkpoint_id).num_computed

    def _check_chunk(self, chunk: PrefillChunk, starting: Mapping[int, SlotStart]) -> None:
        self._check_slot(chunk.slot)
        known, computed = self._known(chunk.slot, starting)
        if known != computed:
            raise PlanError(f"slot {chunk.slot}: a chunk for a sequence that is decoding")
        if chunk.start != computed:
            raise PlanError(
                f"slot {chunk.slot}: chunk starts at {chunk.start}, required {computed}"
            )
        end = chunk.start + len(chunk.token_ids)
        if not chunk.token_ids or end > self._info.max_context:
            raise PlanError(
                f"slot {chunk.slot}: chunk ends at {end}, required {computed + 1} to {self._info.max_context}"
            )
        if not 0 <= min(chunk.token_ids) <= max(chunk.token_ids) < self._spec.vocab_size:
            raise PlanError(
                f"slot {chunk.slot}: token ids from {min(chunk.token_ids)} to {max(chunk.token_ids)}, "
                f"required 0 to {self._spec.vocab_size - 1}"
            )

    def _check_decode(self, step: DecodeStep, starting: Mapping[int, SlotStart]) -> None:
        self._check_slot(step.slot)
        known, computed = self._known(step.slot, starting)
        if known != computed + 1:
            raise PlanError(f"slot {step.slot}: a decode step before the prompt was read")
        if not 0 <= step.max_draft <= self._info.max_draft:
            raise PlanError(
                f"slot {step.slot}: max_draft {step.max_draft}, required 0 to {self._info.max_draft}"
            )
        if known + step.max_draft > self._info.max_context:
            raise PlanError(
                f"slot {step.slot}: {known} tokens and {step.max_draft} drafts, "
                f"required at most {self._info.max_context} in all"
            )

    def _sequence(self, slot: int) -> SlotSequence:
        sequence = self._slots[slot]
        if sequence is None:
            raise PlanError(f"slot {slot}: no sequence was started in it")
        return sequence

    # Reading

    def _begin(self, start: SlotStart) -> None:
        params = start.sampling
        history = None
        if TokenHistory.needed(params):
            history = TokenHistory.empty(self._spec.vocab_size, self._device)
        sequence = SlotSequence(
            params=params,
            uses_drafts=start.uses_drafts and self._draft_layer is not None,
            history=history,
            stop_ids=frozenset(params.stop_token_ids),
        )
        self._constrain(sequence)
        if self._whole is not None:
            sequence.is_plain = (
                sequence.constraint is None
                and sequence.failure is None
                and params.top_logprobs is None
            )
            self._whole.seat(start.slot, params, history)
        self._slots[start.slot] = sequence
        self._parked.wait(start.slot)
        if start.resume is None:
            self._state.begin(start.slot)
            if self._stages is not None:
                self._stages.order(BeginSlot(slot=start.slot))
        else:
            self._resume(start.slot, sequence, start.resume)

    def _constrain(self, sequence: SlotSequence) -> None:
        params = sequence.params
        if not Constraint.needed(params):
            return
        try:
            matcher = None if params.grammar is None else self._grammars.compile(params.grammar)
        except GrammarError as error:
            # The gateway has compiled it before, so this is rare; the other slots go on.
            sequence.failure = f"the grammar cannot be used: {error}"
            return
        sequence.constraint = Constraint(params, matcher, self._spec.vocab_size)

    def _resume(self, slot: int, sequence: SlotSequence, resume: Resume) -> None:
        self._parked.load_pages(slot, tuple(enumerate(resume.page_ids)))
        mark = self._parked.load_checkpoint(resume.checkpoint_id, slot)
        sequence.ids = list(resume.token_ids)
        sequence.num_computed = mark.num_computed
        # Without cells of its own the draft layer starts here, over cells it never reads well: drafts only.
        cells = mark.num_draft_cells
        sequence.num_draft_cells = mark.num_computed if cells is None else cells
        sequence.num_output = resume.num_output
        if sequence.constraint is not None and resume.num_output:
            sequence.constraint.commit(sequence.ids[-resume.num_output :])
        if sequence.history is not None:
            first_output = len(sequence.ids) - resume.num_output
            sequence.history.add_prompt(sequence.ids[:first_output])
            sequence.history.add_output(sequence.ids[first_output:])

    # Parking

    def _park(self, plan: WindowPlan) -> None:
        for page_id in plan.drop_page_ids:
            self._parked.drop_page(page_id)
        for checkpoint_id in plan.drop_checkpoint_ids:
            self._parked.drop_checkpoint(checkpoint_id)
        for suspend in plan.suspends:
            computed = self._sequence(suspend.slot).num_computed
            self._save_checkpoint(suspend.checkpoint_id, suspend.slot, computed)
        saved: dict[int, list[tuple[int, int]]] = {}
        for save in plan.saves:
            saved.setdefault(save.slot, []).append((save.index, save.page_id))
        for slot, pages in saved.items():
            self._parked.save_pages(slot, pages)
        if self._files is not None:
            self._begin_file_work(plan, self._files)

    def _begin_file_work(self, plan: WindowPlan, files: ParkedFiles) -> None:
        parked = self._parked
        for file_id in plan.drop_file_ids:
            files.delete(file_id)
        for order in plan.writes:
            cells = [parked.mark(i).num_draft_cells for i in order.checkpoint_ids]
            memory = parked.memory(order.page_ids, order.checkpoint_ids)
            files.write(order, cells, memory, parked.fence())
        for order in plan.reads:
            parked.reserve(order.page_ids, order.checkpoint_ids)
            memory = parked.memory(order.page_ids, order.checkpoint_ids)
            files.read(order, memory, parked.fence())

    def _finish_files(self, *, wait: bool) -> tuple[FileDone, ...]:
        """What was done; checkpoints that were read can be resumed from now on."""
        if self._files is None:
            return ()
        finished = self._files.take_finished(wait=wait)
        for one in finished:
            if one.read is None:
                continue
            for checkpoint_id, mark in zip(one.read.checkpoint_ids, one.marks, strict=False):
                self._parked.set_mark(
                    checkpoint_id,
                    CheckpointMark(
                        num_computed=mark.key.position, num_draft_cells=mark.num_draft_cells
                    ),
                )
        return tuple(one.done for one in finished)

    def _save_checkpoint(self, checkpoint_id: int, slot: int, num_computed: int) -> None:
        sequence = self._sequence(slot)
        mark = CheckpointMark(
            num_computed=num_computed,
            num_draft_cells=sequence.num_draft_cells if sequence.uses_drafts else None,
        )
        self._parked.save_checkpoint(checkpoint_id, slot, mark)

    def _begin_piece(self, chunk: PrefillChunk) -> _Piece:
        """Take the ids as known and computed, and let the other stages read them."""
        slot, token_ids = chunk.slot, chunk.token_ids
        sequence = self._sequence(slot)
        if sequence.history is not None:
            sequence.history.add_prompt(token_ids)
        sequence.ids.extend(token_ids)
        end = sequence.num_computed = chunk.start + len(token_ids)
        ids = self._with_context(sequence.ids[:end], len(token_ids))
        if isinstance(self._trunk, StagedTrunk):
            self._trunk.launch_chunk(ids, slot, chunk.start, chunk.checkpoint_id)
        return _Piece(chunk=chunk, ids=ids, end=end)

    def _finish_piece(self, piece: _Piece) -> None:
        chunk, failures = piece.chunk, self._answers.failures
        sequence = self._sequence(chunk.slot)
        streams = self._read_piece(piece)
        if chunk.checkpoint_id is not None:
            self._save_checkpoint(chunk.checkpoint_id, chunk.slot, piece.end)
        if not chunk.is_last:
            return
        logits = self._trunk.logits(streams[-1:])
        row = self._pick_row(sequence)
        picks = self._picker.pick(logits, [row], check=True)
        picked = picks.ids
        if not picks.finite[0]:
            failures.append(self._not_finite(chunk.slot))
            return
        if (message := _failure(sequence, [row])) is not None:
            failures.append(SlotFailure(slot=chunk.slot, message=message, is_grammar=True))
            return
        self._add_output(sequence, picked)
        self._answers.tokens.append(
            SlotTokens(
                slot=chunk.slot,
                token_ids=tuple(picked),
                num_drafted=0,
                num_accepted=0,
                logprobs=_logprobs(sequence.params, logits, picked),
            )
        )

    def _read_piece(self, piece: _Piece) -> Tensor:
        """Read a piece, and the draft layer's cells as far as the next ids are known. Returns [T, S*H]."""
        slot, sequence = piece.chunk.slot, self._sequence(piece.chunk.slot)
        # Only now: the piece before this one may have left a checkpoint since this one was begun.
        self._parked.wait(slot)
        streams = self._trunk.chunk(piece.ids, slot, piece.chunk.start, self._state)
        if sequence.uses_drafts and self._draft_layer is not None:
            self._read_draft_cells(piece, streams, self._draft_layer.read_chunk)
        return streams

    def _read_draft_cells(
        self,
        piece: _Piece,
        streams: Tensor,
        read_chunk: Callable[[Tensor, Tensor, int, int, SlotState], None],
    ) -> None:
        """Cell i needs the id at i + 1, so the last position's cell waits for the next id with its streams."""
        slot, sequence = piece.chunk.slot, self._sequence(piece.chunk.slot)
        first = sequence.num_draft_cells
        waiting = self._state.pending[slot, : piece.chunk.start - first]
        known = torch.cat((waiting, streams[:-1])) if waiting.shape[0] else streams[:-1]
        if known.shape[0]:
            ids = sequence.ids[first + 1 : first + 1 + known.shape[0]]
            read_chunk(self._on_device(torch.tensor(ids)), known, slot, first, self._state)
        self._state.pending[slot, 0] = streams[-1]
        sequence.num_draft_cells = piece.end - 1

    def _with_context(self, ids: Sequence[int], num_rows: int) -> Tensor:
        """The last num_rows ids, each after the ids before it: int64 [num_rows, context + 1] on the host."""
        context = self._trunk.ngram_context
        first = len(ids) - num_rows - context
        padding = [self._spec.ple.eos_id] * -first if first < 0 and self._spec.ple else []
        known = torch.tensor([*padding, *ids[max(0, first) :]])
        # Copies of overlapping rows lie column after column where there are fewer rows than columns; kernels read rows.
        return known.unfold(0, context + 1, 1).contiguous()

    def _on_device(self, values: Tensor) -> Tensor:
        """Copied in the order of the device's work, for which nobody waits."""
        return values.to(self._device, non_blocking=True)

    # Drafting

    def _draft(self, steps: Sequence[DecodeStep]) -> dict[int, list[Draft]]:
        """Write the cells that wait, then draft a chain for each slot that may: drafts by slot."""
        layer = self._draft_layer
        using = [step for step in steps if self._sequence(step.slot).uses_drafts]
        if layer is None or not using:
            return {}
        using.sort(key=lambda step: -self._num_pending(step.slot))
        drafting = [step for step in using if step.max_draft > 0]
        reading = [step.slot for step in using if step.max_draft == 0]
        if reading:
            rows, ids, streams = self._pending_rows(reading)
            layer.read_rows(ids, streams, rows, self._state)
        chains: dict[int, list[Draft]] = {step.slot: [] for step in using}
        if drafting:
            self._draft_chains(drafting, chains)
        for step in using:
            sequence = self._sequence(step.slot)
            sequence.num_draft_cells = sequence.num_computed
        return chains

    def _num_pending(self, slot: int) -> int:
        sequence = self._sequence(slot)
        return sequence.num_computed - sequence.num_draft_cells

    def _pending_rows(self, slots: Sequence[int]) -> tuple[Rows, Tensor, Tensor]:
        """Rows whose draft cells wait, the ids after them and the trunk's streams at them."""
        sequences = [self._sequence(slot) for slot in slots]
        counts = [self._num_pending(slot) for slot in slots]
        rows = Rows(slots, counts, [s.num_draft_cells for s in sequences], self._device)
        ids = [i for s in sequences for i in s.ids[s.num_draft_cells + 1 : s.num_computed + 1]]
        return (
            rows,
            self._on_device(self._buffers.next_ids(ids)),
            self._state.waiting(slots, counts),
        )

    def _draft_chains(self, steps: Sequence[DecodeStep], chains: dict[int, list[Draft]]) -> None:
        """Chains in one go for the slots whose picks allow it, draft by draft for the others."""
        one_by_one = list(steps)
        if self._chain is not None:
            able = [self._can_chain(self._sequence(step.slot), self._chain) for step in steps]
            at_once = [step for step, yes in zip(steps, able, strict=True) if yes]
            one_by_one = [step for step, yes in zip(steps, able, strict=True) if not yes]
            if at_once:
                self._chain_at_once(at_once, chains, self._chain)
        if one_by_one:
            self._chain_one_by_one(one_by_one, chains)

    def _can_chain(self, sequence: SlotSequence, chain: DraftChain) -> bool:
        return sequence.failure is None and chain.can_pick(self._pick_row(sequence))

    def _chain_at_once(
        self, steps: Sequence[DecodeStep], chains: dict[int, list[Draft]], chain: DraftChain
    ) -> None:
        rows, ids, streams = self._pending_rows([step.slot for step in steps])
        first = [self._pick_row(self._sequence(step.slot)) for step in steps]
        found = chain.chain(ids, streams, rows, first, steps)
        for b, step in enumerate(steps):
            for drafted in found:
                if not self._extend(
                    step, chains[step.slot], drafted.ids[b], drafted.probabilities[b]
                ):
                    break

    def _chain_one_by_one(
        self, steps: Sequence[DecodeStep], chains: dict[int, list[Draft]]
    ) -> None:
        layer = self._draft_layer
        assert layer is not None
        active = list(steps)
        rows, ids, streams = self._pending_rows([step.slot for step in active])
        while True:
            last = self._on_device(torch.tensor(rows.last_rows()))
            logits, streams = layer.draft(ids, streams, rows, last, self._state)
            kept = self._extend_chains(active, logits, chains)
            if not kept:
                return
            active = [active[i] for i in kept]
            slots = [step.slot for step in active]
            starts = [self._sequence(s).num_computed - 1 + len(chains[s]) for s in slots]
            rows = Rows(slots, [1] * len(slots), starts, self._device)
            ids = self._on_device(torch.tensor([chains[s][-1].token_id for s in slots]))
            streams = streams[kept]

    def _extend_chains(
        self, steps: Sequence[DecodeStep], logits: Tensor, chains: dict[int, list[Draft]]
    ) -> list[int]:
        """Pick one draft per slot and add those that pass the gate; returns which chains may go on."""
        rows = [
            self._pick_row(self._sequence(step.slot), [d.token_id for d in chains[step.slot]])
            for step in steps
        ]
        picks = self._picker.pick(logits, rows)
        kept: list[int] = []
        for i, step in enumerate(steps):
            if _failure(self._sequence(step.slot), [rows[i]]) is not None:
                continue
            if self._extend(step, chains[step.slot], picks.ids[i], picks.probabilities[i]):
                kept.append(i)
        return kept

    def _extend(
        self, step: DecodeStep, chain: list[Draft], token_id: int, probability: float
    ) -> bool:
        """Add a draft that passes the gate; whether the chain may go on after it."""
        # Not `<`: a probability that is not a number ends the chain.
        if not probability >= step.spec_min_p:
            return False
        chain.append(Draft(token_id=token_id, probability=probability))
        return len(chain) < step.max_draft and token_id not in self._sequence(step.slot).stop_ids

    # Verifying

    def _begin_decode(self, steps: Sequence[DecodeStep]) -> _Window:
        """Draft, and let the other stages verify."""
        began = time.perf_counter()
        for step in steps:
            self._parked.wait(step.slot)
        chains = self._draft(steps)
        window = {
            s.slot: (self._sequence(s.slot).ids[-1], *(d.token_id for d in chains.get(s.slot, ())))
            for s in steps
        }
        self._answers.draft_s += time.perf_counter() - began
        return self._begin_window(window)

    def _finish_decode(self, verified: _Window) -> None:
        """Verify, accept, commit."""
        tokens, failures = self._answers.tokens, self._answers.failures
        streams = self._trunk.window(verified.flat, verified.rows, self._state)
        logits = self._trunk.logits(streams)
        rows = [
            self._pick_row(self._sequence(slot), ids[1 : i + 1])
            for slot, ids in verified.ids.items()
            for i in range(len(ids))
        ]
        picks = self._picker.pick(logits, rows, check=True)
        committed: dict[int, int] = {}
        for slot, ids in verified.ids.items():
            first = verified.offsets[slot]
            end = first + len(ids)
            sequence = self._sequence(slot)
            if not all(picks.finite[first:end]):
                failures.append(self._not_finite(slot))
                continue
            accepted = accept(picks.ids[first:end], ids[1:], sequence.stop_ids)
            kept = list(accepted.token_ids)
            if (message := _failure(sequence, rows[first : first + len(kept)])) is not None:
                failures.append(SlotFailure(slot=slot, message=message, is_grammar=True))
                continue
            committed[slot] = len(kept)
            self._add_output(sequence, kept)
            tokens.append(
                SlotTokens(
                    slot=slot,
                    token_ids=accepted.token_ids,
                    num_drafted=len(ids) - 1,
                    num_accepted=accepted.num_accepted,
                    logprobs=_logprobs(sequence.params, logits[first:end], kept),
                )
            )
        self._commit(committed, verified, streams)

    def _not_finite(self, slot: int) -> SlotFailure:
        # Later sequences read whole tiles, and masked cells count 0 times: of NaN that is NaN.
        self._state.clear_kv(slot)
        if self._stages is not None:
            self._stages.order(ClearSlot(slot=slot))
        return SlotFailure(slot=slot, message="the model gave logits that are not finite numbers")

    def _begin_window(self, window: Mapping[int, tuple[int, ...]]) -> _Window:
        """Rows to run through the trunk: the first id of a slot is the next after its computed ones."""
        slots = sorted(window, key=lambda slot: -len(window[slot]))
        counts = [len(window[slot]) for slot in slots]
        starts = [self._sequence(slot).num_computed for slot in slots]
        rows = Rows(slots, counts, starts, self._device)
        flat = self._buffers.window_ids(self._known_around(window, slots))
        if isinstance(self._trunk, StagedTrunk):
            # The next group's window is put together before this one is finished.
            flat = flat.clone()
            self._trunk.launch_window(flat, rows)
        offsets = {slot: sum(counts[:b]) for b, slot in enumerate(slots)}
        ordered = {slot: window[slot] for slot in slots}
        return _Window(rows=rows, flat=flat, offsets=offsets, ids=ordered)

    def _known_around(
        self, window: Mapping[int, tuple[int, ...]], slots: Sequence[int]
    ) -> Iterator[Sequence[int]]:
        """Each row's id after the ids before it, context + 1 in all, slot after slot."""
        context = self._trunk.ngram_context
        for slot in slots:
            sequence = self._sequence(slot)
            before = sequence.ids[max(0, sequence.num_computed - context) : sequence.num_computed]
            missing = context - len(before)
            padding = [self._spec.ple.eos_id] * missing if missing and self._spec.ple else []
            known = [*padding, *before, *window[slot]]
            for i in range(len(window[slot])):
                yield known[i : i + context + 1]

    def _commit(self, num_rows: Mapping[int, int], verified: _Window, streams: Tensor) -> None:
        """Keep the first rows of slots' window; their draft-layer cells wait for the next draft."""
        kept = {slot: KeptRows(verified.offsets[slot], count) for slot, count in num_rows.items()}
        if kept:
            self._trunk.commit(kept, streams, self._state)
        for slot, count in num_rows.items():
            self._sequence(slot).num_computed += count

    def _add_output(self, sequence: SlotSequence, ids: Sequence[int]) -> None:
        sequence.ids.extend(ids)
        sequence.num_output += len(ids)
        if sequence.history is not None:
            sequence.history.add_output(ids)
        if sequence.constraint is not None:
            sequence.constraint.commit(ids)

    def _pick_row(self, sequence: SlotSequence, drafts: Sequence[int] = ()) -> PickRow:
        """The pick that follows the sequence's ids and these drafts."""
        constraint = sequence.constraint
        return PickRow(
            params=sequence.params,
            position=len(sequence.ids) + len(drafts),
            num_output=sequence.num_output + len(drafts),
            history=sequence.history,
            drafts=tuple(drafts),
            limit=None if constraint is None else constraint.limit_after(drafts),
        )

    # Single steps, for comparing with a reference

    @torch.inference_mode()
    def start(self, slot: int, sampling: SamplingParams | None = None) -> None:
        """Seat an empty sequence."""
        self._check_slot(slot)
        self._begin(SlotStart(slot=slot, sampling=sampling or SamplingParams(temperature=0.0)))

    @torch.inference_mode()
    def read(self, slot: int, token_ids: Sequence[int], start: int) -> None:
        """Read ids at [start, start + T), seating a new sequence at 0."""
        if start == 0:
            self.start(slot)
        self._read_piece(self._begin_piece(_one_piece(slot, token_ids, start)))

    @torch.inference_mode()
    def prefill_logits(self, slot: int, token_ids: Sequence[int], start: int) -> Tensor:
        """Read ids at [start, start + T), seating a new sequence at 0; fp32 logits [T, vocab] of every row."""
        if start == 0:
            self.start(slot)
        piece = self._begin_piece(_one_piece(slot, token_ids, start))
        return self._trunk.logits(self._read_piece(piece)).clone()

    @torch.inference_mode()
    def verify_logits(self, rows: Mapping[int, tuple[int, ...]]) -> dict[int, Tensor]:
        """One verify window of given ids per slot, not committed: fp32 logits [rows, vocab] by slot."""
        window = self._begin_window(rows)
        streams = self._trunk.window(window.flat, window.rows, self._state)
        self._unverified = window, streams
        logits = self._trunk.logits(streams).clone()
        firsts = window.offsets
        return {s: logits[firsts[s] : firsts[s] + len(ids)] for s, ids in rows.items()}

    @torch.inference_mode()
    def commit(self, num_rows: Mapping[int, int]) -> None:
        """Keep the first rows of the window that `verify_logits` ran, and take their ids as computed."""
        assert self._unverified is not None
        window, streams = self._unverified
        known = {slot: self._num_known_ahead(slot) for slot in num_rows}
        self._commit(num_rows, window, streams)
        for slot, count in num_rows.items():
            self._sequence(slot).ids.extend(window.ids[slot][known[slot] : count])

    def _num_known_ahead(self, slot: int) -> int:
        sequence = self._sequence(slot)
        return len(sequence.ids) - sequence.num_computed

    @torch.inference_mode()
    def draft(self, steps: Sequence[DecodeStep]) -> dict[int, list[Draft]]:
        """Draft as a window would, for slots whose last id is not computed yet; nothing is verified."""
        return self._draft(steps)


def _check_distinct(slots: Sequence[int]) -> None:
    if len(set(slots)) != len(slots):
        raise PlanError(f"a slot has two kinds of work in one plan: slots {slots}")


def _only_decodes(plan: WindowPlan) -> bool:
    return bool(plan.decodes) and not (
        plan.chunks
        or plan.starts
        or plan.suspends
        or plan.saves
        or plan.drop_page_ids
        or plan.drop_checkpoint_ids
        or plan.drop_file_ids
        or plan.writes
        or plan.reads
        or plan.waits_for_files
    )


def _one_piece(slot: int, token_ids: Sequence[int], start: int) -> PrefillChunk:
    return PrefillChunk(slot=slot, start=start, token_ids=tuple(token_ids), is_last=False)


def _failure(sequence: SlotSequence, rows: Sequence[PickRow]) -> str | None:
    """What in the sequence's grammar leaves these rows without a pick."""
    if sequence.failure is not None:
        return sequence.failure
    errors = (row.limit.error for row in rows if row.limit is not None)
    found = next((error for error in errors if error is not None), None)
    return None if found is None else f"the grammar leads nowhere: {found}"


def _logprobs(
    params: SamplingParams, logits: Tensor, ids: Sequence[int]
) -> tuple[TokenLogprobs, ...] | None:
    """logits: one row [vocab] per id, more rows are ignored."""
    if params.top_logprobs is None:
        return None
    num_top = params.top_logprobs
    return tuple(row_logprobs(logits[i], token_id, num_top) for i, token_id in enumerate(ids))
