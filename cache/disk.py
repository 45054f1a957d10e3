"""DiskIndex: which conversations have files, for whom, in how many bytes. Decides by file id; sees no file.

A checkpoint of a file is known by a digest of its owner, of how prompts are read, and of every token before it. So the
index is small, holds neither keys nor text, and a prompt finds a checkpoint exactly when all of that agrees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from cache.errors import StoreFull
from cache.eviction import Candidate, choose_victim

if TYPE_CHECKING:
    from cache.entry import TokenPrefix

MAX_FILES = 10_000
"""So that what is told of them at a start is small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestCheckpoint:
    """A checkpoint in a file."""

    position: int
    digest: bytes


@dataclass(slots=True, kw_only=True, eq=False)
class FiledConversation:
    """A conversation that has a file, or will have one. Only the index changes it."""

    file_id: str
    checkpoints: tuple[DigestCheckpoint, ...]
    """By position; none: the file is of no use to anyone here."""
    num_bytes: int
    is_written: bool
    num_uses: int = 0
    last_used: int = 0
    floor: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMatch:
    """A conversation file, and its first checkpoints up to the one to resume at."""

    filed: FiledConversation
    checkpoints: tuple[DigestCheckpoint, ...]

    @property
    def position(self) -> int:
        return self.checkpoints[-1].position


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStats:
    """The files at one moment; the counts only grow."""

    num_files: int
    num_bytes: int
    capacity_bytes: int
    hits: int
    """Conversations that were read from their file."""
    written: int
    evictions: int
    failures: int
    """Files that could not be written, or were refused when they were read."""


class DiskIndex:
    """At most `capacity_bytes` bytes in at most MAX_FILES files."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._files: dict[str, FiledConversation] = {}
        self._drops: list[str] = []
        self._now = 0
        self._floor = 0.0
        self._num_hits = self._num_written = self._num_evictions = self._num_failures = 0

    @property
    def num_bytes(self) -> int:
        """Of all files, those that are being written included."""
        return sum(filed.num_bytes for filed in self._files.values())

    def positions(self) -> frozenset[int]:
        """Everywhere that some file has a checkpoint."""
        return frozenset(
            checkpoint.position
            for filed in self._files.values()
            for checkpoint in filed.checkpoints
        )

    def replace_all(self, files: Iterable[tuple[str, int, tuple[DigestCheckpoint, ...]]]) -> None:
        """What the directory holds now: (id, bytes, checkpoints), those used longest ago first."""
        self._files.clear()
        self._drops.clear()
        for file_id, num_bytes, checkpoints in files:
            self._add(file_id, num_bytes, checkpoints, is_written=True)
        while self._files and not self._fits(0, 0):
            self._evict()

    def match(self, digests: Mapping[int, bytes]) -> FileMatch | None:
        """The deepest checkpoint of a whole file whose digest is the prompt's at that position."""
        best: FileMatch | None = None
        for filed in self._files.values():
            if not filed.is_written:
                continue
            agreeing = [c for c in filed.checkpoints if digests.get(c.position) == c.digest]
            if agreeing and (best is None or agreeing[-1].position > best.position):
                end = filed.checkpoints.index(agreeing[-1]) + 1
                best = FileMatch(filed=filed, checkpoints=filed.checkpoints[:end])
        return best

    def has(self, file_id: str) -> bool:
        return file_id in self._files

    def reserve(
        self, file_id: str, num_bytes: int, checkpoints: tuple[DigestCheckpoint, ...]
    ) -> None:
        """Make room for a file that will be written. Raises StoreFull, with nothing evicted, when it cannot fit."""
        assert file_id not in self._files
        if num_bytes > self._capacity_bytes:
            raise StoreFull(
                needed_bytes=num_bytes, held_bytes=0, capacity_bytes=self._capacity_bytes
            )
        while not self._fits(num_bytes, 1):
            self._evict()
        self._add(file_id, num_bytes, checkpoints, is_written=False)

    def written(self, file_id: str, digests: Mapping[int, bytes]) -> None:
        """The file is whole. Those that it continues are of no more use; digests: its own, at all `positions`."""
        filed = self._files[file_id]
        filed.is_written = True
        self._num_written += 1
        for other in tuple(self._files.values()):
            last = other.checkpoints[-1] if other.checkpoints else None
            if other is filed or last is None or not other.is_written:
                continue
            if digests.get(last.position) == last.digest:
                self._drop(other.file_id)

    def used(self, file_id: str) -> None:
        """A conversation was read from it."""
        self._num_hits += 1
        filed = self._files.get(file_id)
        if filed is not None:
            filed.num_uses += 1
            self._touch(filed)

    def failed(self, file_id: str) -> None:
        """The file could not be written, or was refused: it is not there any more."""
        self._num_failures += 1
        self._files.pop(file_id, None)

    def undo(self, *, reserved: Iterable[str], dropped: Iterable[str]) -> None:
        """An order to write `reserved` and to delete `dropped` was not carried out."""
        for file_id in reserved:
            self._files.pop(file_id, None)
        self._drops[:0] = dropped

    @property
    def has_drops(self) -> bool:
        return bool(self._drops)

    def take_drops(self) -> tuple[str, ...]:
        """Files to delete, before anything new is written."""
        taken, self._drops = tuple(self._drops), []
        return taken

    def stats(self) -> DiskStats:
        return DiskStats(
            num_files=len(self._files),
            num_bytes=self.num_bytes,
            capacity_bytes=self._capacity_bytes,
            hits=self._num_hits,
            written=self._num_written,
            evictions=self._num_evictions,
            failures=self._num_failures,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless the limit holds and nothing is both kept and deleted."""
        assert self.num_bytes <= self._capacity_bytes, "too many bytes of files"
        assert not self._files.keys() & set(self._drops), "a file that is kept is deleted"
        for filed in self._files.values():
            positions = [checkpoint.position for checkpoint in filed.checkpoints]
            assert positions == sorted(set(positions)), "checkpoints out of order"

    def _fits(self, num_bytes: int, num_files: int) -> bool:
        return (
            self.num_bytes + num_bytes <= self._capacity_bytes
            and len(self._files) + num_files <= MAX_FILES
        )

    def _add(
        self,
        file_id: str,
        num_bytes: int,
        checkpoints: tuple[DigestCheckpoint, ...],
        *,
        is_written: bool,
    ) -> None:
        filed = FiledConversation(
            file_id=file_id, checkpoints=checkpoints, num_bytes=num_bytes, is_written=is_written
        )
        self._touch(filed)
        self._files[file_id] = filed

    def _evict(self) -> None:
        files = list(self._files.values())
        victim = choose_victim(_candidate(i, filed) for i, filed in enumerate(files))
        self._floor = max(self._floor, 0.0 if victim.is_superseded else victim.value)
        self._num_evictions += 1
        self._drop(files[victim.index].file_id)

    def _drop(self, file_id: str) -> None:
        del self._files[file_id]
        self._drops.append(file_id)

    def _touch(self, filed: FiledConversation) -> None:
        self._now += 1
        filed.last_used = self._now
        filed.floor = self._floor


def _candidate(index: int, filed: FiledConversation) -> Candidate:
    return Candidate(
        index=index,
        is_superseded=not filed.checkpoints,
        saved_tokens=filed.checkpoints[-1].position if filed.checkpoints else 0,
        freed_bytes=filed.num_bytes,
        num_uses=filed.num_uses,
        last_used=filed.last_used,
        floor=filed.floor,
    )


def prefix_digests(
    identity: bytes, tokens: TokenPrefix, positions: Iterable[int]
) -> dict[int, bytes]:
    """Digest of the first so many tokens, for each position that the tokens reach.

    identity: of the owner and of whatever else must agree; one way, so that none of it can be read from a digest.
    """
    digest = blake2b(digest_size=32, key=blake2b(identity).digest())
    found: dict[int, bytes] = {}
    done = 0
    for position in sorted(p for p in positions if p <= len(tokens)):
        digest.update(tokens.between(done, position))
        done = position
        found[position] = digest.digest()
    return found
