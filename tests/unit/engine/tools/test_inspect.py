"""inspect: the published tables from a configuration alone, and what lies in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.errors import ConfigMismatch
from engine.tools.app import app
from engine.tools.tables import table
from tests.unit.engine.real_config import REAL_TEXT_CONFIG


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def cells(text: str, first: str) -> list[str]:
    """The rest of the row that begins with a name."""
    lines = [line for line in text.splitlines() if line.startswith(f"{first}  ")]
    assert len(lines) == 1, lines
    return lines[0].removeprefix(first).split()


def test_the_tables_of_the_large_model_need_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REAL_TEXT_CONFIG), encoding="utf-8")
    text = run("inspect", str(tmp_path))
    assert cells(text, "routed experts") == ["120,795,955,200", "241.59", "112.50"]
    assert cells(text, "n-gram table") == ["51,200,245,760", "102.40", "47.68"]
    assert cells(text, "gated residuals") == ["640,624,640", "1.28", "0.60"]
    assert cells(text, "all text and MTP") == ["179,551,050,368", "359.10", "167.22"]
    assert cells(text, "trunk without table") == ["125,743,653,760", "251.49", "117.11"]
    recurrent = cells(text, "GDN recurrent S")
    assert recurrent[-4:] == ["113,246,208", "56,623,104", "28,311,552", "sequence"]
    assert cells(text, "K/V")[-4:] == ["-", "24,576", "12,288", "token"]
    assert cells(text, "GDN conv channels") == ["10240", "derived"]
    assert cells(text, "indexer key heads") == ["1", "derived"]
    assert "no weights: " in text


def test_the_default_model_and_its_files() -> None:
    text = run("inspect")
    stored = text[text.index("stored in ") :]
    # 32 experts of 8 layers: codes and one fp32 scale a row of gate, up and down.
    codes = 8 * 32 * 3 * 384 * 40
    scales = 8 * 32 * (2 * 40 + 384) * 4
    assert cells(stored, "routed experts") == [f"{codes + scales:,}", "I8"]
    assert cells(stored, "other") == ["280", "I64"]


def test_a_directory_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigMismatch, match=r"no config\.json"):
        run("inspect", str(tmp_path))


def test_columns_line_up() -> None:
    lines = table(("a", "n"), [("long name", "1"), ("b", "22")]).splitlines()
    assert lines == ["a           n", "-" * 13, "long name   1", "b          22"]
