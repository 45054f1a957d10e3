"""The expert table: sizes follow from each layer's types, and a row that they do not make is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.errors import WeightMismatch
from engine.model_spec import spec_from_config
from engine.pack.experts import ExpertShape, make_table, parse_experts
from engine.sources import ggml_types as types
from tests.unit.engine.real_config import REAL_TEXT_CONFIG

SHAPE = ExpertShape(hidden=2560, width=640)
# The two rows that a real pack begins with.
PUBLISHED = [
    "# strata native experts v3: layer gu_type d_type offset blob_bytes gate_off up_off down_off [shard]",
    "# (n_expert 512, total 1625292800; absolute offsets in m-00001-of-00002.gguf, or in the named shard beside it)",
    "0 17 20 0 1868800 1227833216 1473813376 755052416",
    "1 16 42 956825600 1305600 2016152832 2235918592 1779301632",
]  # fmt: skip


def test_the_published_rows_have_the_sizes_of_their_types() -> None:
    table = parse_experts("\n".join(PUBLISHED), SHAPE)
    first, second = table.layers
    assert (first.gate_up, first.down, first.blob_bytes) == (types.IQ2_XS, types.IQ4_NL, 1_868_800)
    assert (second.gate_up, second.down, second.blob_bytes) == (
        types.IQ2_XXS,
        types.Q2_0,
        1_305_600,
    )
    assert second.offset == 512 * first.blob_bytes
    assert table.file == "m-00001-of-00002.gguf"
    assert table.total_bytes == 512 * (1_868_800 + 1_305_600)


def test_a_table_that_is_written_is_read_again() -> None:
    small = {**REAL_TEXT_CONFIG, "num_hidden_layers": 3, "num_experts": 10}
    spec = spec_from_config(small, name="x")
    kinds = [(types.IQ2_XS, types.IQ4_NL), (types.BF16, types.BF16), (types.I8_ROW, types.F32)]
    table = make_table(spec, kinds)
    assert [layer.blob_bytes for layer in table.layers] == [
        1_868_800,
        3 * 2560 * 640 * 2,
        2 * (2560 * 640 + 640 * 4) + 2560 * 640 * 4,
    ]
    assert parse_experts(table.text(), SHAPE) == table


def replace(old: str, new: str) -> Callable[[str], str]:
    return lambda line: line.replace(old, new)


@pytest.mark.parametrize(
    ("row", "change", "message"),
    [
        (1, replace("v3", "v4"), "row 1: found version 4, required 3"),
        (1, replace("# strata", "#"), "row 1: found '# native"),
        (2, replace("n_expert", "experts"), "found 0 lines '# \\(n_expert N"),
        (2, replace("1625292800", "1625292801"), "found total 1625292801, required 1625292800"),
        (3, lambda line: line[:-10], "row 3: found 7 fields, required 8 or 9"),
        (3, lambda line: line + " a b", "row 3: found 10 fields, required 8 or 9"),
        (3, replace("0 17", "x 17"), "row 3: found 'x', required a whole number"),
        (3, replace("0 17", "1 17"), "row 3: found layer 1, required 0"),
        (4, replace("1 16", "2 16"), "row 4: found layer 2, required 1"),
        (3, replace(" 17 ", " 4 "), "row 3 gu_type: found GGML type 4, required one of"),
        (3, replace(" 17 ", " 16 "), "found blob_bytes for types IQ2_XXS/IQ4_NL 1868800, required 1766400"),
        # One layer's size is not another's.
        (4, replace("1305600", "1868800"), "row 4: found blob_bytes .* 1868800, required 1305600"),
        (4, replace("956825600", "956825601"), "row 4: found offset 956825601, required 956825600"),
        (4, replace("956825600", "956825536"), "row 4: found offset 956825536, required 956825600"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_refused(row: int, change: Callable[[str], str], message: str) -> None:
    lines = list(PUBLISHED)
    lines[row - 1] = change(lines[row - 1])
    assert lines != PUBLISHED
    with pytest.raises(WeightMismatch, match=message):
        parse_experts("\n".join(lines), SHAPE)


def test_offsets_into_the_pack_s_own_file_are_checked() -> None:
    spec = spec_from_config({**REAL_TEXT_CONFIG, "num_hidden_layers": 2}, name="x")
    text = make_table(spec, [(types.Q8_0, types.Q8_0)] * 2).text()
    part = 2560 * 640 // 32 * 34
    with pytest.raises(WeightMismatch, match=f"found up_off {part + 1}, required {part}"):
        parse_experts(text.replace(f" {part} ", f" {part + 1} "), SHAPE)
