"""Ids live as long as somebody refers to them, and their bytes are dropped exactly once."""

from __future__ import annotations

from collections import Counter

import pytest

from cache.pages import IdLedger


def test_bytes_are_dropped_when_the_last_reference_goes() -> None:
    ledger = IdLedger()
    page = ledger.create()
    ledger.mark_made((page,))
    ledger.retain((page,))
    ledger.release((page,))
    assert ledger.take_dropped() == ()
    ledger.release((page,))
    assert page not in ledger
    assert ledger.take_dropped() == (page,)
    assert ledger.take_dropped() == ()
    assert ledger.made_ids() == frozenset()


def test_an_id_that_was_never_written_needs_no_drop() -> None:
    ledger = IdLedger()
    ledger.release((ledger.create(),))
    assert ledger.take_dropped() == ()
    assert len(ledger) == 0


def test_ids_are_never_used_twice_even_after_everything_was_lost() -> None:
    ledger = IdLedger()
    first = ledger.create()
    ledger.mark_made((first,))
    ledger.clear()
    assert ledger.create() != first
    assert ledger.take_dropped() == ()


def test_an_order_that_was_not_carried_out_is_taken_back() -> None:
    ledger = IdLedger()
    kept, new, gone = ledger.create(), ledger.create(), ledger.create()
    ledger.mark_made((kept, gone))
    ledger.release((gone,))
    drops = ledger.take_dropped()
    ledger.mark_made((new,))
    ledger.release((new,))
    ledger.undo(made=(new,), dropped=drops)
    assert ledger.take_dropped() == (gone,)
    assert ledger.made_ids() == {kept}


def test_a_wrong_count_is_found() -> None:
    ledger = IdLedger()
    page = ledger.create()
    ledger.check_integrity(Counter({page: 1}))
    with pytest.raises(AssertionError, match="recount"):
        ledger.check_integrity(Counter())


@pytest.mark.parametrize("use", ["retain", "release", "mark_made"])
def test_a_dead_id_cannot_be_used(use: str) -> None:
    with pytest.raises(AssertionError, match="not live"):
        getattr(IdLedger(), use)((3,))
