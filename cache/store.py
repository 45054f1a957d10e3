"""ConversationStore: what is parked, for whom, in how many bytes. Decides by id; sees neither requests nor tensors.

Bytes are counted from the moment an id is given out until its last reference goes, whoever holds it: parked
conversations or running sequences. Both limits always hold.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache.entry import Checkpoint, ParkedConversation, TokenPrefix
from cache.errors import StaleHandle, StoreFull
from cache.eviction import Candidate, choose_victim
from cache.lease import Lease, NewPage, Suspended
from cache.pages import IdLedger
from cache.prefix import Match, deepest_usable, longest_match

if TYPE_CHECKING:
    from cache.config import CacheConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """Of what the ids stand for."""

    page_tokens: int
    page_bytes: int
    checkpoint_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """The store at one moment; the counts only grow."""

    num_conversations: int
    num_bytes: int
    capacity_bytes: int
    max_conversations: int
    lookups: int
    hits: int
    resumed_tokens: int
    parked: int
    evictions: int
    refused: int
    """Pages, checkpoints or conversations for which there was no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drops:
    """Ids whose bytes are of no use any more."""

    page_ids: tuple[int, ...] = ()
    checkpoint_ids: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Counts:
    lookups: int = 0
    hits: int = 0
    resumed_tokens: int = 0
    parked: int = 0
    evictions: int = 0
    refused: int = 0


class ConversationStore:
    """At most `max_conversations` conversations and `capacity_bytes` bytes."""

    def __init__(self, config: CacheConfig, sizes: BlockSizes) -> None:
        self._config = config
        self._sizes = sizes
        self._pages = IdLedger()
        self._checkpoints = IdLedger()
        self._parked: list[ParkedConversation] = []
        self._leases: set[Lease] = set()
        self._news: list[ParkedConversation] = []
        self._now = 0
        self._floor = 0.0
        self._counts = _Counts()

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def num_bytes(self) -> int:
        """Bytes behind all live ids."""
        return self._bytes(len(self._pages), len(self._checkpoints))

    @property
    def pages(self) -> IdLedger:
        return self._pages

    @property
    def checkpoints(self) -> IdLedger:
        return self._checkpoints

    def match(
        self, owner: str, tokens: TokenPrefix, may_resume_at: Callable[[int], bool]
    ) -> Match | None:
        """What `take` would resume from; changes nothing."""
        return longest_match(self._parked, owner, tokens, may_resume_at)

    def take(
        self,
        owner: str,
        token_ids: Sequence[int],
        *,
        may_resume_at: Callable[[int], bool],
        wanted_checkpoints: Collection[int] = (),
    ) -> Lease:
        """A lease for a prompt, on the longest state parked for a prefix of it, if there is any.

        wanted_checkpoints: positions at which the prompt's own conversation should have one; those that exist below
        the match are shared.
        """
        tokens = TokenPrefix.of(token_ids)
        match = self.match(owner, tokens, may_resume_at)
        self._counts.lookups += 1
        if match is None:
            return self._lease(owner, tokens, resumed=None, page_ids=(), shared=[])
        found, resumed = match.conversation, match.checkpoint
        self._touch(found)
        found.num_uses += 1
        self._counts.hits += 1
        self._counts.resumed_tokens += resumed.position
        below = [c for c in found.checkpoints if c.position <= resumed.position]
        return self._lease(
            owner,
            tokens,
            resumed=resumed,
            page_ids=found.page_ids[: self._num_pages(resumed.position)],
            shared=[c for c in below if c.position in wanted_checkpoints],
        )

    def add_checkpoint(self, lease: Lease, position: int) -> int:
        """A new id for the running state at `position`, which must lie behind the lease's others. Raises StoreFull."""
        self._check(lease)
        last = lease.checkpoints[-1].position if lease.checkpoints else 0
        assert max(last, lease.num_resumed_tokens) < position < len(lease.tokens)
        self._make_room(self._sizes.checkpoint_bytes)
        checkpoint_id = self._checkpoints.create()
        lease.checkpoints.append(Checkpoint(position=position, checkpoint_id=checkpoint_id))
        return checkpoint_id

    def add_final(self, lease: Lease, token_ids: Sequence[int]) -> int:
        """A new id for the running state behind all of these tokens, the prompt and what was decoded. Raises StoreFull.

        The lease is parked with these tokens then.
        """
        self._check(lease)
        tokens = TokenPrefix.of(token_ids)
        assert tokens.begins_with(lease.tokens)
        self._make_room(self._sizes.checkpoint_bytes)
        lease.tokens = tokens
        checkpoint_id = self._checkpoints.create()
        lease.checkpoints.append(Checkpoint(position=len(tokens), checkpoint_id=checkpoint_id))
        return checkpoint_id

    def put(self, lease: Lease, *, keep: bool = False) -> tuple[NewPage, ...]:
        """Park the prompt up to the lease's last checkpoint and end the lease; with `keep` it goes on.

        Returns the pages that must be written for it: none when it has no checkpoint of its own, or the same is parked
        already.
        Raises StoreFull; what becomes of the lease is the same then.
        """
        self._check(lease)
        try:
            return self._put(lease)
        finally:
            if not keep:
                lease.release()

    def suspend(self, lease: Lease, num_tokens: int) -> tuple[NewPage, ...]:
        """Room for the whole state of the lease's sequence after `num_tokens` tokens; see lease.suspended.

        Returns the pages that must be written. Raises StoreFull, and the lease is as it was.
        """
        self._check(lease)
        assert lease.suspended is None, "suspended twice"
        shared = lease.page_ids[: lease.num_resumed_tokens // self._sizes.page_tokens]
        num_new = self._num_pages(num_tokens) - len(shared)
        self._make_room(self._bytes(num_new, 1))
        new_pages = self._create_pages(len(shared), num_new)
        self._pages.retain(shared)
        lease.suspended = Suspended(
            checkpoint_id=self._checkpoints.create(),
            page_ids=shared + tuple(page.page_id for page in new_pages),
        )
        return new_pages

    def end_suspension(self, lease: Lease) -> None:
        """The sequence has a slot again: what was kept for it goes."""
        self._check(lease)
        suspended, lease.suspended = lease.suspended, None
        assert suspended is not None, "not suspended"
        self._pages.release(suspended.page_ids)
        self._checkpoints.release((suspended.checkpoint_id,))

    def take_news(self) -> tuple[ParkedConversation, ...]:
        """What was parked since the last call and still is."""
        news = tuple(parked for parked in self._news if parked in self._parked)
        self._news.clear()
        return news

    def is_superseded(self, parked: ParkedConversation) -> bool:
        """Whether it is not parked any more, or another one continues it."""
        return parked not in self._parked or self._is_continued(parked)

    def hold(self, parked: ParkedConversation) -> Lease:
        """A lease that keeps the bytes of a parked conversation, whatever becomes of it in the store."""
        return self._lease(
            parked.owner,
            parked.tokens,
            resumed=None,
            page_ids=parked.page_ids,
            shared=list(parked.checkpoints),
        )

    def reserve(self, owner: str, tokens: TokenPrefix, positions: Sequence[int]) -> Lease:
        """A lease on new ids for a conversation of these tokens, to be filled and then given to `adopt`.

        positions: of its checkpoints, the last at the end of the tokens. Raises StoreFull.
        """
        num_pages = self._num_pages(len(tokens))
        self._make_room(self._bytes(num_pages, len(positions)), num_conversations=1)
        page_ids = tuple(page.page_id for page in self._create_pages(0, num_pages))
        checkpoints = [
            Checkpoint(position=position, checkpoint_id=self._checkpoints.create())
            for position in positions
        ]
        lease = self._lease(owner, tokens, resumed=None, page_ids=page_ids, shared=checkpoints)
        self._pages.release(page_ids)
        self._checkpoints.release(checkpoint.checkpoint_id for checkpoint in checkpoints)
        return lease

    def adopt(self, lease: Lease) -> None:
        """Park what a reserved lease was filled with, and end the lease. Raises StoreFull, with the lease ended."""
        self._check(lease)
        with lease:
            if self._twin(lease.owner, lease.tokens) is not None:
                return
            self._make_room(0, num_conversations=1)
            self._pages.retain(lease.page_ids)
            self._checkpoints.retain(c.checkpoint_id for c in lease.checkpoints)
            self._park(
                ParkedConversation(
                    owner=lease.owner,
                    tokens=lease.tokens,
                    checkpoints=tuple(lease.checkpoints),
                    page_ids=lease.page_ids,
                )
            )

    def evict(self) -> ParkedConversation:
        """Forget the conversation that is worth least; at least one must be parked."""
        victim = choose_victim(self._candidate(i, c) for i, c in enumerate(self._parked))
        self._floor = max(self._floor, 0.0 if victim.is_superseded else victim.value)
        self._counts.evictions += 1
        return self._forget(victim.index)

    def evict_all(self) -> None:
        """Forget every conversation; leases stay."""
        while self._parked:
            self.evict()

    def take_drops(self) -> Drops:
        """Everything that died since the last call; its bytes must go before new ones are written."""
        return Drops(
            page_ids=self._pages.take_dropped(), checkpoint_ids=self._checkpoints.take_dropped()
        )

    def clear(self) -> None:
        """The engine's memory is gone: nothing is parked, and every lease has ended."""
        self._parked.clear()
        self._news.clear()
        for lease in self._leases:
            lease.ended = True
        self._leases.clear()
        self._pages.clear()
        self._checkpoints.clear()

    def stats(self) -> StoreStats:
        counts = self._counts
        return StoreStats(
            num_conversations=len(self._parked),
            num_bytes=self.num_bytes,
            capacity_bytes=self._config.capacity_bytes,
            max_conversations=self._config.max_conversations,
            lookups=counts.lookups,
            hits=counts.hits,
            resumed_tokens=counts.resumed_tokens,
            parked=counts.parked,
            evictions=counts.evictions,
            refused=counts.refused,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless a recount of everything agrees and both limits hold."""
        pages: Counter[int] = Counter()
        checkpoints: Counter[int] = Counter()
        for parked in self._parked:
            pages.update(parked.page_ids)
            checkpoints.update(c.checkpoint_id for c in parked.checkpoints)
            self._check_parked(parked)
        for lease in self._leases:
            assert not lease.ended, "an ended lease is still held"
            pages.update(lease.held_page_ids())
            checkpoints.update(lease.held_checkpoint_ids())
        self._pages.check_integrity(pages)
        self._checkpoints.check_integrity(checkpoints)
        assert len(self._parked) <= self._config.max_conversations, "too many conversations"
        assert self.num_bytes <= self._config.capacity_bytes, "too many bytes"

    def _check_parked(self, parked: ParkedConversation) -> None:
        positions = [checkpoint.position for checkpoint in parked.checkpoints]
        assert positions == sorted(set(positions)) and positions, "checkpoints out of order"
        assert positions[-1] == parked.num_tokens, "tokens behind the last checkpoint"
        assert len(parked.page_ids) == self._num_pages(parked.num_tokens), "wrong number of pages"
        counts = [self._pages.count(page_id) for page_id in parked.page_ids]
        assert counts == sorted(counts, reverse=True), "a page is shared without those before it"
        twins = [p for p in self._parked if p.owner == parked.owner and p.tokens == parked.tokens]
        assert len(twins) == 1, "parked twice"

    def _put(self, lease: Lease) -> tuple[NewPage, ...]:
        num_tokens = lease.checkpoints[-1].position if lease.checkpoints else 0
        if num_tokens <= lease.num_resumed_tokens:
            return ()
        tokens = lease.tokens.first(num_tokens)
        twin = self._twin(lease.owner, tokens)
        if twin is not None:
            self._touch(twin)
            return ()
        shared = self._share(lease)
        num_new = self._num_pages(num_tokens) - len(shared)
        try:
            self._make_room(self._bytes(num_new, 0), num_conversations=1)
        except StoreFull:
            self._pages.release(shared)
            raise
        new_pages = self._create_pages(len(shared), num_new)
        self._checkpoints.retain(c.checkpoint_id for c in lease.checkpoints)
        parked = ParkedConversation(
            owner=lease.owner,
            tokens=tokens,
            checkpoints=tuple(lease.checkpoints),
            page_ids=shared + tuple(page.page_id for page in new_pages),
        )
        self._park(parked)
        return new_pages

    def _park(self, parked: ParkedConversation) -> None:
        self._touch(parked)
        self._parked.append(parked)
        self._news.append(parked)
        self._counts.parked += 1

    def _twin(self, owner: str, tokens: TokenPrefix) -> ParkedConversation | None:
        """The same, parked already."""
        return next((p for p in self._parked if p.owner == owner and p.tokens == tokens), None)

    def _share(self, lease: Lease) -> tuple[int, ...]:
        """Swap the lease's checkpoints for equal ones that are parked; returns the full pages that can be shared with
        whoever has the deepest equal state, each with one more reference.

        Two prompts that agree up to a checkpoint of both were read alike up to there.
        """
        page_tokens = self._sizes.page_tokens
        shared = lease.page_ids[: lease.num_resumed_tokens // page_tokens]
        for i, own in enumerate(lease.checkpoints):
            twin = self._same_checkpoint(lease, own.position)
            if twin is None:
                continue
            other, equal = twin.conversation, twin.checkpoint
            if equal.checkpoint_id != own.checkpoint_id:
                self._checkpoints.retain((equal.checkpoint_id,))
                self._checkpoints.release((own.checkpoint_id,))
                lease.checkpoints[i] = equal
            if own.position >= lease.num_resumed_tokens:
                shared = other.page_ids[: own.position // page_tokens]
        self._pages.retain(shared)
        return shared

    def _same_checkpoint(self, lease: Lease, position: int) -> Match | None:
        """A parked checkpoint of the same tokens."""
        for parked in self._parked:
            if parked.owner != lease.owner:
                continue
            found = deepest_usable(parked, lease.tokens, lambda at: at == position)
            if found is not None:
                return Match(conversation=parked, checkpoint=found)
        return None

    def _lease(
        self,
        owner: str,
        tokens: TokenPrefix,
        *,
        resumed: Checkpoint | None,
        page_ids: tuple[int, ...],
        shared: list[Checkpoint],
    ) -> Lease:
        lease = Lease(
            owner=owner,
            tokens=tokens,
            resumed=resumed,
            page_ids=page_ids,
            checkpoints=shared,
            on_release=self._release,
        )
        self._pages.retain(lease.held_page_ids())
        self._checkpoints.retain(lease.held_checkpoint_ids())
        self._leases.add(lease)
        return lease

    def _release(self, lease: Lease) -> None:
        self._pages.release(lease.held_page_ids())
        self._checkpoints.release(lease.held_checkpoint_ids())
        self._leases.remove(lease)
        lease.ended = True

    def _check(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise StaleHandle("the lease has ended")

    def _make_room(self, num_bytes: int, num_conversations: int = 0) -> None:
        """Evict until so much more fits. Raises StoreFull, with nothing evicted, when it cannot."""
        limit = self._config.capacity_bytes
        max_parked = self._config.max_conversations - num_conversations
        if self.num_bytes + num_bytes > limit or max_parked < 0:
            held = self._leased_bytes()
            if held + num_bytes > limit or max_parked < 0:
                self._counts.refused += 1
                raise StoreFull(needed_bytes=num_bytes, held_bytes=held, capacity_bytes=limit)
        while self.num_bytes + num_bytes > limit or len(self._parked) > max_parked:
            self.evict()

    def _leased_bytes(self) -> int:
        """Bytes that no eviction frees."""
        pages = {page_id for lease in self._leases for page_id in lease.held_page_ids()}
        checkpoints = {held for lease in self._leases for held in lease.held_checkpoint_ids()}
        return self._bytes(len(pages), len(checkpoints))

    def _candidate(self, index: int, parked: ParkedConversation) -> Candidate:
        return Candidate(
            index=index,
            is_superseded=self._is_continued(parked),
            saved_tokens=parked.num_tokens,
            freed_bytes=self._freed_bytes(parked),
            num_uses=parked.num_uses,
            last_used=parked.last_used,
            floor=parked.floor,
        )

    def _is_continued(self, parked: ParkedConversation) -> bool:
        return any(
            other is not parked
            and other.owner == parked.owner
            and other.tokens.begins_with(parked.tokens)
            for other in self._parked
        )

    def _freed_bytes(self, parked: ParkedConversation) -> int:
        """A page is never shared without those before it, so the pages of one holder alone come last."""
        page_ids = parked.page_ids
        num_shared = bisect_left(
            page_ids, 1, key=lambda page_id: 1 if self._pages.count(page_id) == 1 else 0
        )
        own = [c for c in parked.checkpoints if self._checkpoints.count(c.checkpoint_id) == 1]
        return self._bytes(len(page_ids) - num_shared, len(own))

    def _forget(self, index: int) -> ParkedConversation:
        parked = self._parked.pop(index)
        self._pages.release(parked.page_ids)
        self._checkpoints.release(c.checkpoint_id for c in parked.checkpoints)
        return parked

    def _touch(self, parked: ParkedConversation) -> None:
        self._now += 1
        parked.last_used = self._now
        parked.floor = self._floor

    def _create_pages(self, first_index: int, num_pages: int) -> tuple[NewPage, ...]:
        indices = range(first_index, first_index + num_pages)
        return tuple(NewPage(page_id=self._pages.create(), index=index) for index in indices)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._sizes.page_tokens)

    def _bytes(self, num_pages: int, num_checkpoints: int) -> int:
        sizes = self._sizes
        return num_pages * sizes.page_bytes + num_checkpoints * sizes.checkpoint_bytes
