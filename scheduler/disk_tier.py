"""The disk tier: what is parked in memory gets a file, and a prompt whose state is only on disk gets it back.

Joins the index, which decides by file id, with the store and the engine, whose thread moves the bytes beside the
windows. A conversation is written once all of it is in memory and nothing continues it yet, one at a time; its bytes
stay in memory until the file is whole. A request that waits for a file waits without a slot.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cache.disk import DigestCheckpoint, DiskIndex, DiskStats, prefix_digests
from cache.errors import StoreFull
from engine.interface import KeptCheckpoint, ReadFile, WriteFile

if TYPE_CHECKING:
    from cache.config import CacheConfig
    from cache.entry import ParkedConversation, TokenPrefix
    from cache.lease import Lease
    from cache.store import ConversationStore
    from engine.interface import EngineInfo, FileDone, KeptFile, WindowPlan
    from scheduler.sequence import SequenceState

_LOG = logging.getLogger(__name__)
_MAX_WAITING = 64
"""Conversations that wait to be written; beyond it the oldest are forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOrders:
    """What the engine shall do with files."""

    drop_file_ids: tuple[str, ...] = ()
    writes: tuple[WriteFile, ...] = ()
    reads: tuple[ReadFile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    lease: Lease
    file_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    lease: Lease
    order: ReadFile
    waiting: list[SequenceState] = field(default_factory=list["SequenceState"])


class DiskTier:
    """Files of one engine's parked conversations. Owned by Parking."""

    def __init__(
        self,
        config: CacheConfig,
        info: EngineInfo,
        store: ConversationStore,
        identity_of: Callable[[str], bytes],
    ) -> None:
        """identity_of: what an owner's digests are keyed with."""
        self._info = info
        self._store = store
        self._identity_of = identity_of
        self._index = DiskIndex(config.disk_bytes)
        self._index.replace_all(_indexed(info.files))
        self._unwritten: deque[ParkedConversation] = deque(maxlen=_MAX_WAITING)
        self._write: _Write | None = None
        self._reads: dict[str, _Read] = {}
        self._new_reads: list[ReadFile] = []

    @property
    def is_busy(self) -> bool:
        """Whether something is to be written, read or deleted."""
        return bool(self._unwritten or self._write or self._reads or self._index.has_drops)

    def stats(self) -> DiskStats:
        return self._index.stats()

    def note(self, parked: Iterable[ParkedConversation]) -> None:
        """These are in memory now, and shall get files."""
        self._unwritten.extend(parked)

    def fetch(
        self,
        sequence: SequenceState,
        tokens: TokenPrefix,
        may_resume_at: Callable[[int], bool],
    ) -> None:
        """Begin to read what the prompt can go on from, if a file has more of it than memory has."""
        positions = [p for p in self._index.positions() if p < len(tokens) and may_resume_at(p)]
        if not positions:
            return
        owner = sequence.request.owner
        match = self._index.match(prefix_digests(self._identity_of(owner), tokens, positions))
        if match is None:
            return
        in_memory = self._store.match(owner, tokens, may_resume_at)
        if in_memory is not None and in_memory.checkpoint.position >= match.position:
            return
        file_id = match.filed.file_id
        read = self._reads.get(file_id)
        if read is None:
            read = self._begin_read(file_id, owner, tokens, match.checkpoints)
        if read is not None and len(read.lease.tokens) >= match.position:
            read.waiting.append(sequence)
            sequence.is_fetching = True

    def orders(self) -> FileOrders:
        """What the next plan shall carry; pages that it writes may be saved by the same plan."""
        writes = self._next_write() if self._write is None else ()
        reads, self._new_reads = tuple(self._new_reads), []
        return FileOrders(drop_file_ids=self._index.take_drops(), writes=writes, reads=reads)

    def done(self, results: Iterable[FileDone]) -> None:
        """Take in what the engine has done."""
        for result in results:
            if result.is_write:
                self._written(result)
            else:
                self._was_read(result)

    def refused(self, plan: WindowPlan) -> None:
        """The plan was not carried out."""
        self._index.undo(
            reserved=[order.file_id for order in plan.writes], dropped=plan.drop_file_ids
        )
        if plan.writes and self._write is not None:
            self._write.lease.release()
            self._write = None
        for order in plan.reads:
            self._end_read(self._reads.pop(order.file_id))

    def clear(self, files: Iterable[KeptFile]) -> None:
        """The engine's memory is gone; the next one has found these files."""
        self._index.replace_all(_indexed(files))
        self._unwritten.clear()
        self._write = None
        for read in self._reads.values():
            _go_on(read.waiting)
        self._reads.clear()
        self._new_reads.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError unless the books balance."""
        self._index.check_integrity()
        leases = [read.lease for read in self._reads.values()]
        leases += [self._write.lease] if self._write is not None else []
        assert not any(lease.ended for lease in leases), "a lost lease"

    def _begin_read(
        self,
        file_id: str,
        owner: str,
        tokens: TokenPrefix,
        checkpoints: tuple[DigestCheckpoint, ...],
    ) -> _Read | None:
        positions = [checkpoint.position for checkpoint in checkpoints]
        try:
            lease = self._store.reserve(owner, tokens.first(positions[-1]), positions)
        except StoreFull as error:
            _LOG.debug("not read from disk: %s", error)
            return None
        order = ReadFile(
            file_id=file_id,
            checkpoints=_kept(checkpoints),
            checkpoint_ids=tuple(c.checkpoint_id for c in lease.checkpoints),
            page_ids=lease.page_ids,
        )
        self._new_reads.append(order)
        self._reads[file_id] = _Read(lease=lease, order=order)
        return self._reads[file_id]

    def _next_write(self) -> tuple[WriteFile, ...]:
        """The next conversation that is all in memory, not continued, and without a file."""
        for _ in range(len(self._unwritten)):
            parked = self._unwritten.popleft()
            if self._store.is_superseded(parked):
                continue
            if not self._is_made(parked):
                self._unwritten.append(parked)
                continue
            checkpoints = self._digests_of(parked)
            file_id = checkpoints[-1].digest.hex()
            if self._index.has(file_id):
                continue
            try:
                self._index.reserve(file_id, self._file_bytes(parked), checkpoints)
            except StoreFull as error:
                _LOG.info("not written to disk: %s", error)
                continue
            self._write = _Write(lease=self._store.hold(parked), file_id=file_id)
            order = WriteFile(
                file_id=file_id,
                checkpoints=_kept(checkpoints),
                checkpoint_ids=tuple(c.checkpoint_id for c in parked.checkpoints),
                page_ids=parked.page_ids,
            )
            return (order,)
        return ()

    def _is_made(self, parked: ParkedConversation) -> bool:
        checkpoint_ids = (checkpoint.checkpoint_id for checkpoint in parked.checkpoints)
        store = self._store
        return store.pages.are_made(parked.page_ids) and store.checkpoints.are_made(checkpoint_ids)

    def _digests_of(self, parked: ParkedConversation) -> tuple[DigestCheckpoint, ...]:
        positions = [checkpoint.position for checkpoint in parked.checkpoints]
        digests = prefix_digests(self._identity_of(parked.owner), parked.tokens, positions)
        return tuple(DigestCheckpoint(position=p, digest=digests[p]) for p in positions)

    def _file_bytes(self, parked: ParkedConversation) -> int:
        """A little more than the file will have: its header is small."""
        info = self._info
        num_bytes = len(parked.page_ids) * info.page_bytes
        num_bytes += len(parked.checkpoints) * info.checkpoint_bytes
        return num_bytes + num_bytes // 64 + 8192

    def _written(self, result: FileDone) -> None:
        write, self._write = self._write, None
        assert write is not None and write.file_id == result.file_id, "an answer nobody asked for"
        if not result.ok:
            self._index.failed(result.file_id)
        else:
            identity = self._identity_of(write.lease.owner)
            positions = self._index.positions()
            digests = prefix_digests(identity, write.lease.tokens, positions)
            self._index.written(result.file_id, digests)
        write.lease.release()

    def _was_read(self, result: FileDone) -> None:
        read = self._reads.pop(result.file_id)
        if not result.ok:
            self._index.failed(result.file_id)
            self._end_read(read)
            return
        self._index.used(result.file_id)
        try:
            self._store.adopt(read.lease)
        except StoreFull as error:
            _LOG.debug("not kept after it was read from disk: %s", error)
        _go_on(read.waiting)

    def _end_read(self, read: _Read) -> None:
        read.lease.release()
        _go_on(read.waiting)


def _go_on(waiting: list[SequenceState]) -> None:
    for sequence in waiting:
        sequence.is_fetching = False


def _kept(checkpoints: tuple[DigestCheckpoint, ...]) -> tuple[KeptCheckpoint, ...]:
    return tuple(KeptCheckpoint(position=c.position, digest=c.digest) for c in checkpoints)


def _indexed(
    files: Iterable[KeptFile],
) -> Iterable[tuple[str, int, tuple[DigestCheckpoint, ...]]]:
    for file in files:
        checkpoints = tuple(
            DigestCheckpoint(position=c.position, digest=c.digest) for c in file.checkpoints
        )
        yield file.file_id, file.num_bytes, checkpoints
