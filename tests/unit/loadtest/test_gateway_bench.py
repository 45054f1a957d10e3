from __future__ import annotations

from loadtest.gateway_bench import Round, counted


def one(chunks_per_s: float, others: float) -> Round:
    return Round(
        chunks_per_s=chunks_per_s,
        server_us=1.0,
        client_us=1.0,
        p50_delay_ms=0.0,
        p99_delay_ms=0.0,
        missed=0,
        others=others,
    )


def test_pairs_of_which_one_was_disturbed_are_left_out() -> None:
    pairs = [(one(5, 0.0), one(6, 0.01)), (one(2, 0.9), one(6, 0.0)), (one(5, 0.0), one(3, 1.1))]
    ours, bare, note = counted(pairs)
    assert ([a.chunks_per_s for a in ours], [b.chunks_per_s for b in bare]) == ([5], [6])
    assert note == "2 of 3 rounds beside other work, of 1.10 cores at most, left out"


def test_where_all_were_disturbed_all_count() -> None:
    ours, bare, note = counted([(one(2, 0.9), one(3, 0.9))] * 2)
    assert (len(ours), len(bare)) == (2, 2)
    assert note == "2 of 2 rounds beside other work, of 0.90 cores at most"
