"""The store: what is kept, shared, found and evicted, in how many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from cache.config import CacheConfig
from cache.errors import StaleHandle, StoreFull
from cache.lease import Lease, NewPage
from cache.store import BlockSizes, ConversationStore, Drops

SIZES = BlockSizes(page_tokens=4, page_bytes=10, checkpoint_bytes=100)
CONFIG = CacheConfig(max_conversations=3, capacity_bytes=10_000)
TEXT = tuple(range(50))


@pytest.fixture
def store() -> Iterator[ConversationStore]:
    store = ConversationStore(CONFIG, SIZES)
    yield store
    store.check_integrity()


def lease(
    store: ConversationStore,
    prompt: tuple[int, ...],
    *wanted: int,
    owner: str = "ann",
) -> Lease:
    return store.take(owner, prompt, may_resume_at=lambda position: True, wanted_checkpoints=wanted)


def park(
    store: ConversationStore, prompt: tuple[int, ...], *positions: int, owner: str = "ann"
) -> tuple[NewPage, ...]:
    """As if the prompt had been read with checkpoints at the positions."""
    taken = lease(store, prompt, *positions, owner=owner)
    for position in positions:
        if position > taken.num_resumed_tokens:
            store.add_checkpoint(taken, position)
    new_pages = store.put(taken)
    made(store)
    return new_pages


def made(store: ConversationStore) -> Drops:
    """All orders go out."""
    drops = store.take_drops()
    for ledger in (store.pages, store.checkpoints):
        ledger.mark_made(i for i in range(1000) if i in ledger)
    return drops


def resumes_at(store: ConversationStore, prompt: tuple[int, ...], owner: str = "ann") -> int:
    with lease(store, prompt, owner=owner) as taken:
        return taken.num_resumed_tokens


def test_a_parked_prompt_is_found_again(store: ConversationStore) -> None:
    new_pages = park(store, TEXT[:12], 6)
    assert [page.index for page in new_pages] == [0, 1]
    assert store.num_bytes == 2 * 10 + 100
    with lease(store, TEXT[:20]) as taken:
        assert taken.num_resumed_tokens == 6
        assert taken.page_ids == tuple(page.page_id for page in new_pages)
    stats = store.stats()
    assert (stats.lookups, stats.hits, stats.resumed_tokens) == (2, 1, 6)


def test_without_a_checkpoint_nothing_is_kept(store: ConversationStore) -> None:
    assert park(store, TEXT[:12]) == ()
    assert len(store) == 0
    assert store.num_bytes == 0


def test_the_next_turn_shares_the_full_pages_it_resumed_from(store: ConversationStore) -> None:
    first = park(store, TEXT[:12], 10)
    second = park(store, TEXT[:30], 20)
    assert [page.index for page in first] == [0, 1, 2]
    assert [page.index for page in second] == [2, 3, 4]
    assert store.num_bytes == (3 + 3) * 10 + 2 * 100


def test_a_wanted_checkpoint_below_the_match_is_shared(store: ConversationStore) -> None:
    park(store, TEXT[:12], 4, 10)
    park(store, TEXT[:30], 4, 20)
    assert store.num_bytes == (3 + 3) * 10 + 3 * 100
    store.evict()
    assert resumes_at(store, (*TEXT[:4], 99)) == 4


def test_a_system_prompt_read_twice_at_once_is_kept_once(store: ConversationStore) -> None:
    one, two = (lease(store, (*TEXT[:8], *tail)) for tail in ((70, 71, 72), (80, 81, 82)))
    for taken in (one, two):
        store.add_checkpoint(taken, 8)
        store.add_checkpoint(taken, 10)
    assert [page.index for page in store.put(one)] == [0, 1, 2]
    assert [page.index for page in store.put(two)] == [2]
    assert store.num_bytes == 4 * 10 + 3 * 100


def test_the_same_prompt_is_kept_once(store: ConversationStore) -> None:
    one, two = lease(store, TEXT[:9]), lease(store, TEXT[:9])
    for taken in (one, two):
        store.add_checkpoint(taken, 8)
    assert len(store.put(one)) == 2
    assert store.put(two) == ()
    assert len(store) == 1
    assert store.num_bytes == 2 * 10 + 100


def test_owners_share_nothing(store: ConversationStore) -> None:
    park(store, TEXT[:12], 8, owner="ann")
    assert resumes_at(store, TEXT, owner="bob") == 0
    assert len(park(store, TEXT[:12], 8, owner="bob")) == 2
    assert len(store) == 2
    assert resumes_at(store, TEXT, owner="bob") == 8


def test_the_number_of_conversations_is_limited_and_copies_go_first(
    store: ConversationStore,
) -> None:
    park(store, (90,) * 20, 16)
    park(store, TEXT[:12], 8)
    park(store, TEXT[:30], 20)
    park(store, (91,) * 20, 16)
    assert len(store) == 3
    assert store.stats().evictions == 1
    assert resumes_at(store, (90,) * 21) == 16
    assert resumes_at(store, TEXT[:12]) == 0
    assert resumes_at(store, TEXT) == 20


def test_bytes_are_limited_and_the_least_valuable_goes() -> None:
    store = ConversationStore(replace(CONFIG, capacity_bytes=330), SIZES)
    park(store, (90,) * 8, 4)
    park(store, (91,) * 50, 40)
    assert store.num_bytes == 10 + 100 + 100 + 100
    new_pages = park(store, (92,) * 9, 8)
    assert len(new_pages) == 2
    assert resumes_at(store, (90,) * 8) == 0
    assert resumes_at(store, (91,) * 50) == 40
    store.check_integrity()


def test_what_a_lease_holds_cannot_be_evicted_under_it() -> None:
    store = ConversationStore(replace(CONFIG, capacity_bytes=240), SIZES)
    pages = park(store, TEXT[:12], 8)
    taken = lease(store, TEXT)
    store.evict_all()
    assert made(store) == Drops()
    assert store.num_bytes == 120
    with pytest.raises(StoreFull, match="100 bytes do not fit: 220 of 240"):
        store.add_checkpoint(taken, 20)
        store.add_checkpoint(taken, 24)
    taken.release()
    drops = store.take_drops()
    assert drops.page_ids == tuple(page.page_id for page in pages)
    assert store.num_bytes == 0
    store.check_integrity()


def test_a_conversation_that_does_not_fit_leaves_everything_as_it_was() -> None:
    store = ConversationStore(replace(CONFIG, capacity_bytes=240), SIZES)
    park(store, TEXT[:12], 8)
    taken = lease(store, (99,) * 50)
    store.add_checkpoint(taken, 48)
    held = lease(store, TEXT[:10])
    with pytest.raises(StoreFull):
        store.put(taken)
    assert taken.ended
    assert resumes_at(store, TEXT) == 8
    held.release()
    assert store.num_bytes == 120
    assert store.stats().refused == 1
    store.check_integrity()


def test_no_conversation_at_all_may_be_kept() -> None:
    store = ConversationStore(replace(CONFIG, max_conversations=0), SIZES)
    with pytest.raises(StoreFull):
        park(store, TEXT[:12], 8)
    store.check_integrity()


def test_a_suspended_sequence_is_kept_and_never_matched(store: ConversationStore) -> None:
    park(store, TEXT[:12], 8)
    taken = lease(store, TEXT[:20])
    new_pages = store.suspend(taken, 23)
    assert [page.index for page in new_pages] == [2, 3, 4, 5]
    assert taken.suspended is not None
    assert len(taken.suspended.page_ids) == 6
    store.check_integrity()
    assert resumes_at(store, TEXT) == 8
    store.end_suspension(taken)
    assert store.num_bytes == 120
    taken.release()


def test_a_released_suspension_is_forgotten(store: ConversationStore) -> None:
    taken = lease(store, TEXT[:20])
    store.suspend(taken, 23)
    made(store)
    taken.release()
    assert store.num_bytes == 0
    assert len(store.take_drops().page_ids) == 6


def test_room_for_a_suspended_sequence_is_limited_too() -> None:
    store = ConversationStore(replace(CONFIG, capacity_bytes=130), SIZES)
    taken = lease(store, TEXT[:20])
    with pytest.raises(StoreFull):
        store.suspend(taken, 20)
    assert taken.suspended is None
    taken.release()
    store.check_integrity()


def test_a_lease_ends_once(store: ConversationStore) -> None:
    taken = lease(store, TEXT[:20])
    taken.release()
    taken.release()
    for use in (store.put, store.end_suspension):
        with pytest.raises(StaleHandle):
            use(taken)
    with pytest.raises(StaleHandle):
        store.add_checkpoint(taken, 8)


def test_nothing_survives_the_engine(store: ConversationStore) -> None:
    park(store, TEXT[:12], 8)
    taken = lease(store, TEXT[:20])
    store.clear()
    taken.release()
    assert store.num_bytes == 0
    assert store.take_drops() == Drops()
    assert resumes_at(store, TEXT) == 0
