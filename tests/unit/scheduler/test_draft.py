"""Draft depth follows measured acceptance and measured costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.interface import MAX_SPEC, WindowTimes
from scheduler.draft import Acceptance, DraftBid, WindowCosts, choose_depths


def costs(
    *, base_s: float, row_s: float, draft_s: float = 0.0, draft_base_s: float = 0.0
) -> WindowCosts:
    """Costs after windows of 1 to 20 rows and 0 to 4 draft steps that obey the lines exactly."""
    measured = WindowCosts()
    for number, rows in enumerate((1, 5, 10, 20, 3, 7) * 20):
        steps = number % 5
        times = WindowTimes(
            prefill_s=0.0,
            draft_s=draft_base_s + steps * draft_s,
            verify_s=base_s + row_s * rows,
        )
        measured = observed(measured, rows, steps, times)
    return measured


def observed(measured: WindowCosts, rows: int, steps: int, times: WindowTimes) -> WindowCosts:
    return measured.observe(num_rows=rows, num_draft_steps=steps, uses_drafts=True, times=times)


def bid(rate: float, *, cap: int = MAX_SPEC) -> DraftBid:
    survival = tuple(rate**depth for depth in range(1, MAX_SPEC + 1))
    return DraftBid(cap=cap, survival=survival, reach=(1.0,) * MAX_SPEC)


def test_costs_recover_the_line() -> None:
    measured = costs(base_s=0.010, row_s=0.002, draft_s=0.003, draft_base_s=0.001)
    assert measured.verify.base_s == pytest.approx(0.010, rel=0.05)
    assert measured.verify.slope_s == pytest.approx(0.002, rel=0.05)
    assert measured.draft.slope_s == pytest.approx(0.003, rel=0.05)
    assert measured.draft.base_s == pytest.approx(0.001, rel=0.2)


def test_windows_of_one_height_leave_the_row_cost_at_its_prior() -> None:
    measured = WindowCosts()
    for _ in range(10):
        times = WindowTimes(prefill_s=0.0, draft_s=0.0, verify_s=0.0105)
        measured = observed(measured, 1, 0, times)
    assert measured.verify.slope_s == pytest.approx(0.0005)
    assert measured.verify.base_s == pytest.approx(0.010)
    assert measured.draft.slope_s == 0.0


def test_other_load_on_the_machine_does_not_end_drafting() -> None:
    """Every tenth window is cut off for 2 s; a row costs a tenth of a one-row window."""
    measured = WindowCosts()
    for number in range(100):
        rows, depth = (5, 4) if number % 2 else (1, 0)
        stall_s = 2.0 if number % 10 == 7 else 0.0
        times = WindowTimes(
            prefill_s=0.0, draft_s=0.0005 * depth + stall_s, verify_s=0.01 + 0.001 * rows + stall_s
        )
        measured = observed(measured, rows, depth, times)
    assert measured.verify.slope_s < 0.004
    assert choose_depths((bid(0.9),), measured) == (4,)


def test_a_lasting_slowdown_is_believed() -> None:
    measured = costs(base_s=0.010, row_s=0.0)
    for _ in range(300):
        times = WindowTimes(prefill_s=0.0, draft_s=0.0, verify_s=0.1)
        measured = observed(measured, 5, 0, times)
    assert measured.verify.base_s + 5 * measured.verify.slope_s == pytest.approx(0.1, rel=0.1)


def test_a_falling_line_is_taken_for_a_flat_one() -> None:
    measured = costs(base_s=0.1, row_s=-0.002)
    assert measured.verify.slope_s == 0.0
    assert measured.verify.base_s > 0.0


def test_unmeasured_costs_draft_to_the_cap() -> None:
    assert choose_depths((bid(0.1, cap=3), bid(0.9)), WindowCosts()) == (3, 4)


def test_free_rows_draft_to_the_cap() -> None:
    assert choose_depths((bid(0.3, cap=2), bid(0.3)), costs(base_s=0.01, row_s=0.0)) == (2, 4)


def test_costly_rows_draft_only_what_is_likely() -> None:
    dear = costs(base_s=0.004, row_s=0.004)
    assert choose_depths((bid(0.95),), dear)[0] > choose_depths((bid(0.6),), dear)[0]
    assert choose_depths((bid(0.3),), dear) == (0,)


def test_a_dear_draft_layer_is_not_run() -> None:
    assert choose_depths((bid(0.9),), costs(base_s=0.01, row_s=0.0, draft_s=0.1)) == (0,)


def test_what_the_draft_layer_costs_anyway_does_not_count() -> None:
    assert choose_depths((bid(0.9),), costs(base_s=0.01, row_s=0.0, draft_base_s=0.1)) == (4,)


def test_what_every_window_costs_besides_makes_chains_longer() -> None:
    alone = costs(base_s=0.001, row_s=0.001)
    assert choose_depths((bid(0.6),), alone) == (1,)
    times = WindowTimes(prefill_s=0.0, draft_s=0.0, verify_s=0.003)
    far = alone.observe(num_rows=3, num_draft_steps=0, uses_drafts=True, times=times, rest_s=0.01)
    assert choose_depths((bid(0.6),), far)[0] > 1


def test_of_drafts_made_ahead_only_what_is_left_at_the_plan_counts() -> None:
    measured = costs(base_s=0.001, row_s=0.0, draft_s=0.002)
    assert measured.beside_s(0.004) == pytest.approx(0.004)
    times = WindowTimes(prefill_s=0.0, draft_s=0.002, verify_s=0.001, ahead_s=0.002)
    ahead = measured.observe(
        num_rows=2,
        num_draft_steps=1,
        uses_drafts=True,
        times=times,
        rest_s=0.008,
        hidden_s=0.006,
    )
    assert ahead.beside_s(0.004) == pytest.approx(0.008)
    assert ahead.beside_s(0.010) == pytest.approx(0.012)
    when_asked = observed(ahead, 2, 1, WindowTimes(prefill_s=0.0, draft_s=0.002, verify_s=0.001))
    assert when_asked.beside_s(0.004) == pytest.approx(0.012)


def test_windows_without_the_draft_layer_say_nothing_about_it() -> None:
    times = WindowTimes(prefill_s=0.0, draft_s=1e-6, verify_s=0.01)
    measured = WindowCosts().observe(num_rows=1, num_draft_steps=0, uses_drafts=False, times=times)
    assert not measured.draft.is_measured
    assert measured.verify.is_measured


def test_one_good_slot_does_not_drag_a_poor_one_along() -> None:
    depths = choose_depths((bid(0.95), bid(0.05)), costs(base_s=0.01, row_s=0.003))
    assert depths[0] > 1
    assert depths[1] == 0


def test_a_chain_has_no_gaps() -> None:
    """Draft 2 would be worth its row, but there is none without draft 1."""
    steep = DraftBid(cap=2, survival=(0.3, 0.05, 0.0, 0.0), reach=(1.0, 0.05, 0.0, 0.0))
    assert choose_depths((steep,), costs(base_s=0.001, row_s=0.002)) == (0,)


def test_no_bids_no_depths() -> None:
    assert choose_depths((), costs(base_s=0.01, row_s=0.001)) == ()


@given(
    bids=st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, MAX_SPEC)), max_size=6),
    base_s=st.floats(0.0, 0.1),
    row_s=st.floats(0.0, 0.1),
    draft_s=st.floats(0.0, 0.1),
)
def test_depths_never_exceed_the_cap(
    bids: list[tuple[float, int]], base_s: float, row_s: float, draft_s: float
) -> None:
    chosen = tuple(bid(rate, cap=cap) for rate, cap in bids)
    depths = choose_depths(chosen, costs(base_s=base_s, row_s=row_s, draft_s=draft_s))
    assert len(depths) == len(chosen)
    assert all(0 <= depth <= one.cap for depth, one in zip(depths, chosen, strict=True))


def test_acceptance_converges_to_what_happens() -> None:
    acceptance = Acceptance()
    for step in range(300):
        num_accepted = (0, 1, 2, 4)[step % 4]
        acceptance = acceptance.observe(max_draft=4, num_drafted=4, num_accepted=num_accepted)
    survival = acceptance.survival(Acceptance())
    assert survival == pytest.approx((0.75, 0.5, 0.25, 0.25), abs=0.06)
    assert acceptance.reach(Acceptance()) == (1.0,) * 4


def test_a_short_cap_says_nothing_about_deeper_drafts() -> None:
    acceptance = Acceptance().observe(max_draft=2, num_drafted=2, num_accepted=2)
    assert acceptance.allowed == (1.0, 1.0, 0.0, 0.0)
    assert acceptance.tried == (1.0, 1.0, 0.0, 0.0)


def test_a_young_sequence_leans_on_everyone() -> None:
    everyone = Acceptance()
    for _ in range(200):
        everyone = everyone.observe(max_draft=4, num_drafted=4, num_accepted=0)
    assert Acceptance().survival(everyone)[0] < 0.15 < Acceptance().survival(Acceptance())[0]


def test_the_gate_is_seen_as_reach() -> None:
    acceptance = Acceptance()
    for _ in range(200):
        acceptance = acceptance.observe(max_draft=4, num_drafted=1, num_accepted=1)
    reach = acceptance.reach(Acceptance())
    assert reach[0] == pytest.approx(1.0)
    assert max(reach[1:]) < 0.15
