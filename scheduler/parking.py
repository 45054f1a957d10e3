"""Parking: joins the store, which decides by id, with the slots and the engine, which holds the bytes.

Takes checkpoints while prompts are read, parks a prompt when its sequence leaves its slot, and lets a later prompt go
on from there. Only what the reading path computed is ever parked for others (product.md D3 rule 3); the decoded state
of a suspended sequence is kept for that sequence alone. Orders to the engine ride on the next window's plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cache.entry import TokenPrefix
from cache.errors import StoreFull
from cache.store import BlockSizes, ConversationStore, StoreStats
from engine.interface import PAGE_TOKENS, PrefillChunk, Resume, SavePage, Suspend, WindowPlan
from scheduler.disk_tier import DiskTier
from scheduler.prefill import is_cut

if TYPE_CHECKING:
    from cache.config import CacheConfig
    from cache.disk import DiskStats
    from cache.lease import Lease
    from engine.interface import EngineInfo, FileDone, KeptFile
    from scheduler.sequence import SequenceState
    from scheduler.slots import Slot, SlotTable

_LOG = logging.getLogger(__name__)
_MEMINFO = Path("/proc/meminfo")
_SAVES_PER_WINDOW = 64
"""Pages written in one window unless more are needed at once, so that a long conversation stops nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tenant:
    """A sequence that has, or had, a slot."""

    lease: Lease
    wanted: frozenset[int]
    """Where its prompt should have checkpoints."""


class Parking:
    """What one engine keeps of sequences without a slot. Owned by the loop, like the slots."""

    def __init__(
        self,
        config: CacheConfig,
        info: EngineInfo,
        *,
        turn_token_id: int | None,
        identities: Mapping[str, str],
        free_bytes: Callable[[], int | None] | None = None,
    ) -> None:
        """identities: SchedulerConfig.owner_identities.

        free_bytes: free memory of the host, None where that is unknown.
        """
        self._config = config
        self._chunk_tokens = info.chunk_tokens
        chosen = config.resumes_decoded
        self._resumes_decoded = info.reads_as_decodes if chosen is None else chosen
        self._turn_token_id = turn_token_id
        self._free_bytes = free_host_bytes if free_bytes is None else free_bytes
        self._store = ConversationStore(
            config,
            BlockSizes(
                page_tokens=PAGE_TOKENS,
                page_bytes=info.page_bytes,
                checkpoint_bytes=info.checkpoint_bytes,
            ),
        )
        self._identities = identities
        self._disk: DiskTier | None = None
        if info.keeps_files and config.is_enabled:
            self._disk = DiskTier(config, info, self._store, self._identity_of)
        self._tenants: dict[int, _Tenant] = {}
        self._saves: list[SavePage] = []
        self._saves_per_window = _SAVES_PER_WINDOW
        self._suspends: list[Suspend] = []
        self._sent = WindowPlan()
        self._is_short_of_memory = False

    @property
    def has_orders(self) -> bool:
        """Whether bytes wait to be written."""
        return bool(self._saves or self._suspends)

    def stats(self) -> StoreStats:
        return self._store.stats()

    def disk_stats(self) -> DiskStats | None:
        return None if self._disk is None else self._disk.stats()

    def fetch(self, sequence: SequenceState) -> None:
        """The sequence waits for its first slot: begin to read from disk what memory does not have."""
        prompt_ids = sequence.request.prompt_ids
        if self._disk is not None and self._has_memory():
            self._disk.fetch(
                sequence, TokenPrefix.of(prompt_ids), partial(self._may_resume_at, prompt_ids)
            )

    def files_done(self, results: Iterable[FileDone]) -> None:
        """What the engine has written and read."""
        if self._disk is not None:
            self._disk.done(results)

    def seated(self, sequence: SequenceState) -> None:
        """The sequence has got a slot: from where it goes on."""
        if not self._config.is_enabled:
            return
        prompt_ids = sequence.request.prompt_ids
        tenant = self._tenants.get(sequence.arrival)
        if tenant is not None:
            sequence.resume = _after_suspension(tenant.lease, sequence)
            return
        wanted = self._checkpoint_positions(prompt_ids)
        lease = self._store.take(
            sequence.request.owner,
            prompt_ids,
            may_resume_at=partial(self._may_resume_at, prompt_ids),
            wanted_checkpoints=wanted,
        )
        self._tenants[sequence.arrival] = _Tenant(lease=lease, wanted=wanted)
        if lease.resumed is not None:
            position = lease.resumed.position
            sequence.num_read_tokens = sequence.num_cached_tokens = position
            sequence.resume = Resume(
                checkpoint_id=lease.resumed.checkpoint_id,
                page_ids=lease.page_ids,
                token_ids=prompt_ids[:position],
            )

    def left(self, slot: Slot) -> None:
        """The sequence is over and the engine's slot is as it left it: park its prompt up to the last checkpoint.

        Where decoded state may be resumed, all of a sequence that ended by itself.
        """
        tenant = self._tenants.pop(slot.sequence.arrival, None)
        if tenant is None:
            return
        if slot.sequence.is_started and self._has_memory():
            self._park(slot, tenant.lease)
        else:
            tenant.lease.release()

    def can_share(self, prompt_ids: tuple[int, ...]) -> bool:
        """Whether others with this prompt save anything by waiting for `share`."""
        return self._config.is_enabled and bool(self._checkpoint_positions(prompt_ids))

    def share(self, slot: Slot) -> None:
        """The slot has read its prompt and goes on: park it now, for others with the same one."""
        tenant = self._tenants.get(slot.sequence.arrival)
        if tenant is not None and self._has_memory():
            self._park(slot, tenant.lease, keep=True)

    def _park(self, slot: Slot, lease: Lease, *, keep: bool = False) -> None:
        try:
            if self._resumes_decoded and not keep:
                self._add_decoded(slot, lease)
            new_pages = self._store.put(lease, keep=keep)
        except StoreFull as error:
            _LOG.info("not parked: %s", error)
            return
        self._saves += (
            SavePage(slot=slot.index, page_id=page.page_id, index=page.index) for page in new_pages
        )

    def _add_decoded(self, slot: Slot, lease: Lease) -> None:
        """A checkpoint behind everything that the sequence computed, if there is room."""
        sequence = slot.sequence
        if sequence.cancelled or sequence.finish_reason() is None:
            return
        computed = (*sequence.request.prompt_ids, *sequence.output_ids[:-1])
        try:
            checkpoint_id = self._store.add_final(lease, computed)
        except StoreFull as error:
            _LOG.debug("no checkpoint of what was decoded: %s", error)
            return
        self._suspends.append(Suspend(slot=slot.index, checkpoint_id=checkpoint_id))

    def forget(self, sequence: SequenceState) -> None:
        """The sequence is over and nothing of it may be kept, or nothing is left to keep."""
        tenant = self._tenants.pop(sequence.arrival, None)
        if tenant is not None:
            tenant.lease.release()

    def suspend(self, slot: Slot) -> bool:
        """Keep all of a decoding sequence, whose slot may then be given away; False when there is no room."""
        sequence = slot.sequence
        tenant = self._tenants.get(sequence.arrival)
        if tenant is None or not self._has_memory():
            return False
        try:
            new_pages = self._store.suspend(tenant.lease, sequence.num_computed_tokens)
        except StoreFull as error:
            _LOG.debug("not suspended: %s", error)
            return False
        suspended = tenant.lease.suspended
        assert suspended is not None
        self._suspends.append(Suspend(slot=slot.index, checkpoint_id=suspended.checkpoint_id))
        self._saves += (
            SavePage(slot=slot.index, page_id=page.page_id, index=page.index) for page in new_pages
        )
        return True

    def complete(self, plan: WindowPlan | None, table: SlotTable) -> WindowPlan | None:
        """The plan with everything that parking has to say to the engine.

        What is resumed must have been written by an earlier window; if it was not, the orders go alone, first.
        """
        self._forget_dead_orders()
        news = self._store.take_news()
        if self._disk is not None:
            self._disk.note(news)
        if plan is None:
            alone = self._with_orders(WindowPlan(), self._due(()))
            return None if alone == WindowPlan() else alone
        if self._is_early(plan):
            return self._with_orders(WindowPlan(), len(self._saves))
        if plan.chunks:
            chunks = tuple(self._with_checkpoint(chunk, table[chunk.slot]) for chunk in plan.chunks)
            plan = replace(plan, chunks=chunks)
            self._forget_dead_orders()
        return self._with_orders(plan, self._due(tuple(start.slot for start in plan.starts)))

    def started(self, sequence: SequenceState) -> None:
        """The sequence was started in its slot."""
        tenant = self._tenants.get(sequence.arrival)
        if tenant is not None and tenant.lease.suspended is not None:
            self._store.end_suspension(tenant.lease)

    def refused(self) -> None:
        """The last plan was not carried out: forget every conversation, the plan's own among them."""
        plan = self._sent
        store = self._store
        store.pages.undo(made=_written_pages(plan), dropped=plan.drop_page_ids)
        store.checkpoints.undo(made=_written_checkpoints(plan), dropped=plan.drop_checkpoint_ids)
        if self._disk is not None:
            self._disk.refused(plan)
        store.evict_all()

    def was_refused(self, sequence: SequenceState) -> bool:
        """Whether a suspended sequence's state was to be written by the last plan."""
        tenant = self._tenants.get(sequence.arrival)
        suspended = None if tenant is None else tenant.lease.suspended
        ids = _written_checkpoints(self._sent)
        return suspended is not None and suspended.checkpoint_id in ids

    def clear(self, files: tuple[KeptFile, ...]) -> None:
        """The engine's memory is gone, and every sequence with it; the next one has found these files."""
        self._store.clear()
        if self._disk is not None:
            self._disk.clear(files)
        self._tenants.clear()
        self._saves.clear()
        self._suspends.clear()

    def check_integrity(self, live: Set[int]) -> None:
        """Raises AssertionError unless the books balance; live: arrivals of the sequences with state to keep."""
        self._store.check_integrity()
        if self._disk is not None:
            self._disk.check_integrity()
        strangers = self._tenants.keys() - live
        assert not strangers, f"state of sequences {sorted(strangers)} that are over"
        assert all(not tenant.lease.ended for tenant in self._tenants.values()), "a lost lease"

    def held_ids(self) -> tuple[frozenset[int], frozenset[int]]:
        """Pages and checkpoints that the engine has."""
        return self._store.pages.made_ids(), self._store.checkpoints.made_ids()

    def _is_early(self, plan: WindowPlan) -> bool:
        """Whether the plan resumes what is not written yet."""
        if not self.has_orders:
            return False
        pages = {save.page_id for save in self._saves}
        checkpoints = {suspend.checkpoint_id for suspend in self._suspends}
        resumes = [start.resume for start in plan.starts if start.resume is not None]
        return any(r.checkpoint_id in checkpoints or pages & set(r.page_ids) for r in resumes)

    def _forget_dead_orders(self) -> None:
        """What was evicted before it was written is not written at all."""
        if self.has_orders:
            pages, checkpoints = self._store.pages, self._store.checkpoints
            self._saves = [s for s in self._saves if s.page_id in pages]
            self._suspends = [s for s in self._suspends if s.checkpoint_id in checkpoints]

    def _due(self, starting: tuple[int, ...]) -> int:
        """How many of the waiting pages must be written now: those of slots that are started, and a window's worth."""
        last = max((i for i, s in enumerate(self._saves) if s.slot in starting), default=-1)
        return max(last + 1, self._saves_per_window)

    def _with_checkpoint(self, chunk: PrefillChunk, sequence: SequenceState) -> PrefillChunk:
        tenant = self._tenants.get(sequence.arrival)
        end = chunk.start + len(chunk.token_ids)
        if tenant is None or end not in tenant.wanted or sequence.cancelled:
            return chunk
        if not self._has_memory():
            return chunk
        try:
            checkpoint_id = self._store.add_checkpoint(tenant.lease, end)
        except StoreFull as error:
            _LOG.debug("no checkpoint: %s", error)
            return chunk
        return replace(chunk, checkpoint_id=checkpoint_id)

    def _with_orders(self, plan: WindowPlan, num_saves: int) -> WindowPlan:
        store = self._store
        drops = store.take_drops()
        if self.has_orders or drops.page_ids or drops.checkpoint_ids:
            plan = replace(
                plan,
                drop_page_ids=drops.page_ids,
                drop_checkpoint_ids=drops.checkpoint_ids,
                suspends=tuple(self._suspends),
                saves=tuple(self._saves[:num_saves]),
            )
            store.pages.mark_made(_written_pages(plan))
            del self._saves[:num_saves]
            self._suspends.clear()
        if plan.chunks or plan.suspends:
            store.checkpoints.mark_made(_written_checkpoints(plan))
        if self._disk is not None and self._disk.is_busy:
            plan = self._with_files(plan, self._disk)
        self._sent = plan
        return plan

    def _with_files(self, plan: WindowPlan, disk: DiskTier) -> WindowPlan:
        orders = disk.orders()
        is_idle = not (plan.chunks or plan.decodes or self._saves)
        plan = replace(
            plan,
            drop_file_ids=orders.drop_file_ids,
            writes=orders.writes,
            reads=orders.reads,
            waits_for_files=is_idle and disk.is_busy,
        )
        for order in plan.reads:
            self._store.pages.mark_made(order.page_ids)
            self._store.checkpoints.mark_made(order.checkpoint_ids)
        return plan

    def _may_resume_at(self, prompt_ids: tuple[int, ...], position: int) -> bool:
        """Where reading goes on exactly as if all had been read; anywhere, when decoded state may be resumed."""
        return self._resumes_decoded or is_cut(
            prompt_ids,
            position,
            chunk_tokens=self._chunk_tokens,
            turn_token_id=self._turn_token_id,
        )

    def _identity_of(self, owner: str) -> bytes:
        """All that must agree besides tokens and model: whose it is, and how prompts are cut."""
        rule = f"{self._turn_token_id} {self._chunk_tokens} {self._resumes_decoded}"
        return f"{rule} {self._identities.get(owner, f'name {owner}')}".encode()

    def _checkpoint_positions(self, prompt_ids: tuple[int, ...]) -> frozenset[int]:
        return checkpoint_positions(
            prompt_ids,
            chunk_tokens=self._chunk_tokens,
            turn_token_id=self._turn_token_id,
            config=self._config,
        )

    def _has_memory(self) -> bool:
        """Whether the host has more free memory than the floor; says so in the log when that changes."""
        free = self._free_bytes()
        is_short = free is not None and free < self._config.min_free_bytes
        if is_short != self._is_short_of_memory:
            self._is_short_of_memory = is_short
            if is_short:
                _LOG.warning(
                    "nothing is parked: %s bytes of memory are free, the floor is %d",
                    free,
                    self._config.min_free_bytes,
                )
            else:
                _LOG.info("parking goes on: %s bytes of memory are free", free)
        return not is_short


def checkpoint_positions(
    prompt_ids: tuple[int, ...],
    *,
    chunk_tokens: int,
    turn_token_id: int | None,
    config: CacheConfig,
) -> frozenset[int]:
    """Where a prompt's running state is kept; all of them are places where every prompt like it is cut.

    At its last turn start, where the next turn of a client that keeps or drops the reply's thinking goes on; behind a
    first turn long enough to be worth sharing; and every so many tokens. Without turns, at the last whole chunk.
    """
    first_turn_end = _second_turn(prompt_ids, turn_token_id)
    if first_turn_end is None:
        wanted = {(len(prompt_ids) - 1) // chunk_tokens * chunk_tokens}
    else:
        wanted = {len(prompt_ids) - 1 - prompt_ids[::-1].index(turn_token_id)}
        if first_turn_end >= config.min_shared_tokens:
            wanted.add(first_turn_end)
    every = -(-config.checkpoint_every_tokens // chunk_tokens) * chunk_tokens
    while len(prompt_ids) > every * (config.max_checkpoints - 1):
        every *= 2
    wanted.update(range(every, len(prompt_ids), every))
    return frozenset(wanted - {0})


def _second_turn(prompt_ids: tuple[int, ...], turn_token_id: int | None) -> int | None:
    """Where the first turn that does not begin the prompt begins."""
    if turn_token_id is None:
        return None
    try:
        return prompt_ids.index(turn_token_id, 1)
    except ValueError:
        return None


def free_host_bytes() -> int | None:
    """Memory that could be taken without swapping; None where the system does not say."""
    try:
        # The kernel's own memory: reading it never waits for a disk.
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = (line.split() for line in lines if line.startswith("MemAvailable:"))
    return next((int(fields[1]) * 1024 for fields in found), None)


def _after_suspension(lease: Lease, sequence: SequenceState) -> Resume:
    suspended = lease.suspended
    assert suspended is not None, "a sequence that has a lease already is seated"
    return Resume(
        checkpoint_id=suspended.checkpoint_id,
        page_ids=suspended.page_ids,
        token_ids=(*sequence.request.prompt_ids, *sequence.output_ids),
        num_output=len(sequence.output_ids),
    )


def _written_pages(plan: WindowPlan) -> tuple[int, ...]:
    read = (page_id for order in plan.reads for page_id in order.page_ids)
    return (*(save.page_id for save in plan.saves), *read)


def _written_checkpoints(plan: WindowPlan) -> tuple[int, ...]:
    kept = (chunk.checkpoint_id for chunk in plan.chunks)
    suspended = (suspend.checkpoint_id for suspend in plan.suspends)
    read = (checkpoint_id for order in plan.reads for checkpoint_id in order.checkpoint_ids)
    written = (checkpoint_id for checkpoint_id in kept if checkpoint_id is not None)
    return (*suspended, *written, *read)
