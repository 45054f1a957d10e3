"""The conversation store under random prompts, suspensions, evictions and losses, recounted after every step.

A model of the engine's memory follows the store's orders: what is written must be new, what is dropped must be there,
and whatever a lease resumes from must hold exactly the tokens of its prompt.
"""

from __future__ import annotations

from contextlib import suppress

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache.config import CacheConfig
from cache.errors import StoreFull
from cache.lease import Lease
from cache.store import BlockSizes, ConversationStore

SIZES = BlockSizes(page_tokens=4, page_bytes=10, checkpoint_bytes=25)
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=24).map(tuple)


class Sequence:
    """A prompt that is read under a lease."""

    def __init__(self, lease: Lease, prompt: tuple[int, ...]) -> None:
        self.lease = lease
        self.prompt = prompt


class StoreMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(0, 400), max_conversations=st.integers(0, 5))
    def build(self, capacity: int, max_conversations: int) -> None:
        config = CacheConfig(max_conversations=max_conversations, capacity_bytes=capacity)
        self.store = ConversationStore(config, SIZES)
        self.running: list[Sequence] = []
        self.pages: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.checkpoints: dict[int, tuple[str, tuple[int, ...]]] = {}

    @rule(prompt=PROMPTS, owner=st.sampled_from("ab"), every=st.integers(1, 4))
    def begin(self, prompt: tuple[int, ...], owner: str, every: int) -> None:
        lease = self.store.take(
            owner,
            prompt,
            may_resume_at=lambda position: position % every == 0,
            wanted_checkpoints=range(0, len(prompt), 2),
        )
        at = lease.num_resumed_tokens
        assert at < len(prompt)
        assert at % every == 0
        if lease.resumed is not None:
            assert self.checkpoints[lease.resumed.checkpoint_id] == (owner, prompt[:at])
        self.expect_pages(owner, lease.page_ids, prompt[:at])
        for checkpoint in lease.checkpoints:
            expected = (owner, prompt[: checkpoint.position])
            assert self.checkpoints[checkpoint.checkpoint_id] == expected
        self.running.append(Sequence(lease, prompt))

    def expect_pages(self, owner: str, page_ids: tuple[int, ...], ids: tuple[int, ...]) -> None:
        assert len(page_ids) == -(-len(ids) // 4)
        for index, page_id in enumerate(page_ids):
            found_owner, found = self.pages[page_id]
            end = min(len(ids), 4 * index + 4)
            assert found_owner == owner
            assert found[:end] == ids[:end]
            assert len(found) >= end

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def read_on(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        lease, prompt = sequence.lease, sequence.prompt
        if lease.suspended is not None:
            return
        last = lease.checkpoints[-1].position if lease.checkpoints else 0
        first = max(last, lease.num_resumed_tokens) + 1
        if first >= len(prompt):
            return
        position = data.draw(st.integers(first, len(prompt) - 1))
        with suppress(StoreFull):
            checkpoint_id = self.store.add_checkpoint(lease, position)
            self.carry_out({}, {checkpoint_id: (lease.owner, prompt[:position])})

    @precondition(lambda self: self.running)
    @rule(data=st.data(), park=st.booleans())
    def end(self, data: st.DataObject, park: bool) -> None:
        sequence = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if not park or sequence.lease.suspended is not None:
            sequence.lease.release()
            return
        with suppress(StoreFull):
            owner, prompt = sequence.lease.owner, sequence.prompt
            new_pages = self.store.put(sequence.lease)
            self.carry_out({page.page_id: (owner, prompt) for page in new_pages}, {})

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_more=st.integers(0, 6))
    def suspend_or_go_on(self, data: st.DataObject, num_more: int) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        lease = sequence.lease
        ids = (*sequence.prompt, *(7,) * num_more)
        if lease.suspended is not None:
            self.store.end_suspension(lease)
            return
        with suppress(StoreFull):
            new_pages = self.store.suspend(lease, len(ids))
            assert lease.suspended is not None
            written = {page.page_id: (lease.owner, ids) for page in new_pages}
            self.carry_out(written, {lease.suspended.checkpoint_id: (lease.owner, ids)})
            self.expect_pages(lease.owner, lease.suspended.page_ids, ids)

    @rule()
    def evict(self) -> None:
        if len(self.store):
            self.store.evict()

    @rule()
    def lose_everything(self) -> None:
        self.store.clear()
        for sequence in self.running:
            sequence.lease.release()
        self.running.clear()
        self.pages.clear()
        self.checkpoints.clear()

    def carry_out(
        self,
        pages: dict[int, tuple[str, tuple[int, ...]]],
        checkpoints: dict[int, tuple[str, tuple[int, ...]]],
    ) -> None:
        """What the engine does with one plan: drops first, then what is new."""
        drops = self.store.take_drops()
        for page_id in drops.page_ids:
            del self.pages[page_id]
        for checkpoint_id in drops.checkpoint_ids:
            del self.checkpoints[checkpoint_id]
        assert not pages.keys() & self.pages.keys()
        assert not checkpoints.keys() & self.checkpoints.keys()
        self.pages |= pages
        self.checkpoints |= checkpoints
        self.store.pages.mark_made(pages)
        self.store.checkpoints.mark_made(checkpoints)

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.check_integrity()
        assert self.store.pages.made_ids() == self.pages.keys()
        assert self.store.checkpoints.made_ids() == self.checkpoints.keys()

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for sequence in self.running:
            sequence.lease.release()
        self.store.evict_all()
        assert self.store.num_bytes == 0
        self.carry_out({}, {})
        assert not self.pages and not self.checkpoints


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
