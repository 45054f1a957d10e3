"""expert-profile.bin: what is written is read, and nothing else is."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ProfileMismatch
from engine.expert_profile import ExpertProfile, profile_of_counts, read_profile, write_profile


@given(
    counts=st.integers(1, 5).flatmap(
        lambda width: st.lists(
            st.lists(st.integers(0, 9), min_size=width, max_size=width), min_size=1, max_size=4
        )
    ),
    kept=st.integers(0, 20),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, counts: list[list[int]], kept: int
) -> None:
    ranked = profile_of_counts(counts)
    profile = ExpertProfile(
        num_layers=ranked.num_layers,
        num_experts=ranked.num_experts,
        pairs=ranked.pairs[:kept],
        slots=kept,
    )
    path = tmp_path_factory.getbasetemp() / "profile.bin"
    write_profile(path, profile)
    assert read_profile(path) == profile
    by_rank = [counts[layer][expert] for layer, expert in ranked.pairs]
    assert by_rank == sorted(by_rank, reverse=True)


def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    path = tmp_path / "profile.bin"
    write_profile(path, ExpertProfile(num_layers=2, num_experts=2, pairs=((1, 0), (0, 1)), slots=7))
    expected = b"STRP" + struct.pack("<5I", 1, 2, 2, 7, 2)
    expected += struct.pack("<4H", 1, 0, 0, 1) + struct.pack("<4i", -1, 1, 0, -1)
    assert path.read_bytes() == expected


def test_all_pairs_of_the_large_model_take_196632_bytes(tmp_path: Path) -> None:
    """24 bytes of header, 24,576 pairs, and as many ranks: the file of 24,576 pairs in all."""
    path = tmp_path / "profile.bin"
    write_profile(path, profile_of_counts([[0] * 512] * 48))
    assert path.stat().st_size == 24 + 24_576 * 4 + 24_576 * 4 == 196_632


def header(
    magic: bytes = b"STRP", version: int = 1, layers: int = 1, experts: int = 2, n: int = 1
) -> bytes:
    return magic + struct.pack("<5I", version, layers, experts, 0, n)


GOOD_BODY = struct.pack("<2H2i", 0, 1, -1, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"STRP", "found 4 bytes, required at least 24"),
        (header(magic=b"PRTS") + GOOD_BODY, "found magic b'PRTS', required b'STRP'"),
        (header(version=2) + GOOD_BODY, "found version 2, required 1"),
        (header(layers=0) + GOOD_BODY, "found 0 layers, required 1 to 65536"),
        (header(n=3) + GOOD_BODY, "found 3 pairs, required at most 1 x 2 = 2"),
        (header() + GOOD_BODY[:-1], "found 35 bytes, required 36"),
        (header() + GOOD_BODY + b"\0", "found 37 bytes, required 36"),
        (header() + struct.pack("<2H2i", 0, 2, -1, 0), "layer 0, expert 2, required below 1 and 2"),
        (header() + struct.pack("<2H2i", 0, 1, -1, 1), "layer 0, expert 1: found 1, required 0"),
        (header() + struct.pack("<2H2i", 0, 1, 0, 0), "found 2 ranks, required 1"),
        (header(n=2) + struct.pack("<4H2i", 0, 1, 0, 1, -1, 1), "expert 1: found 1, required 0"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "profile.bin"
    path.write_bytes(data)
    with pytest.raises(ProfileMismatch, match=message):
        read_profile(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileMismatch, match="nowhere.bin: cannot be read"):
        read_profile(tmp_path / "nowhere.bin")


def test_a_full_layer_skips_only_its_own_pairs() -> None:
    hot_first_layer = ((0, 0), (0, 1), (0, 2), (1, 0), (0, 3), (2, 1), (1, 1))
    profile = ExpertProfile(num_layers=3, num_experts=4, pairs=hot_first_layer)
    assert profile.chosen((2, 2, 2)) == ((0, 0), (0, 1), (1, 0), (2, 1), (1, 1))
