"""`stratagate plan`: a start of the large model on machines that are not here."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from engine.errors import PlanRefused
from engine.tools.app import app
from tests.unit.engine.real_config import REAL_TEXT_CONFIG

runner = CliRunner()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("real")
    (directory / "config.json").write_text(json.dumps(REAL_TEXT_CONFIG), encoding="utf-8")
    return str(directory)


def planned(*arguments: str) -> str:
    result = runner.invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def bytes_of(name: str, text: str) -> int:
    found = re.search(rf"^{re.escape(name)} +([\d,]+)", text, re.MULTILINE)
    assert found, name
    return int(found[1].replace(",", ""))


GPU = ("--vram-mib", "80000", "--ram-mib", "300000", "--batch", "1", "--kv", "bf16")
BIG = (*GPU, "--kernels", "torch")


def test_the_large_model_is_planned_from_its_configuration(real: str) -> None:
    text = planned(real, *BIG, "--ssd", "--expert-cache", "100")
    # model.md 2.1: K/V of 12 layers and the draft layer, GDN state of one sequence; 4.2: one head.
    cells = (262_144 + 5 + 63) // 64 * 64
    assert bytes_of("session k", text) == 13 * 2 * 256 * 2 * cells
    assert bytes_of("session s", text) == 113_246_208
    assert bytes_of("head", text) == 635_699_200 * 2
    assert bytes_of("draft layer", text) >= 2_607_150_848 * 2
    assert bytes_of("experts, tier one", text) == 100 * 4_915_200 * 2
    assert bytes_of("experts, tier two", text) == 24_576 * 4_915_200 * 2
    assert "experts: 100 of 24576 have a slot, 2 to 3 a layer; 24576 lie in host memory" in text
    assert "ple table: stays on the disk" in text  # 102 GB do not fit beside 242 GB of experts


def test_a_gpu_that_is_not_here_is_planned_with_its_kernels(real: str) -> None:
    text = planned(real, *GPU, "--batch", "4", "--max-context", "33000")
    # 4 bits and a scale of two bytes for 128 of them, for 12 x 4096 experts of 3 x 640 x 2560 weights in 48 layers.
    assert bytes_of("experts, 4 bits", text) == 24_576 * 4_915_200 * 33 // 64
    assert bytes_of("head", text) == 635_699_200 * 2
    assert bytes_of("library workspace", text) == 32 << 20
    assert "layers: Triton kernels" in text
    assert "experts: all 24576 on the device, in 4 bits" in text
    small = planned(real, *GPU, "--vram-mib", "24000", "--ple-io", "direct")
    assert re.search(
        r"experts: \d+ of 24576 have a slot, .* lie in host memory, all in 4 bits", small
    )
    assert "ple table" not in small.split("\n\n")[0]
    # Rows, ids, parts and what is between two products, for 20 rows of ten experts each; where each of 24,576 lies.
    row, pair = 2560 * 2 + 20 * (2 * 128 + 8), 4 + 2560 * 4 + 5 * (2 * 128 + 16 + 128 * 4)
    assert bytes_of("experts' pool", small) == 20 * row + 200 * pair + 24_576 * 4
    assert "experts' pool" not in text


def test_the_torch_layers_are_planned_with_the_reason(
    real: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slower = "layers: torch, several times slower: "
    assert f"{slower}--kernels torch\n" in planned(real, *BIG, "--ssd")
    in_float32 = ("--ram-mib", "600000", "--ssd", "--dtype", "float32", "--kv", "auto")
    reason = "it computes in bfloat16, not in float32"
    assert f"{slower}{reason}\n" in planned(real, *GPU, *in_float32)
    here = ("default", "--device", "cpu", "--ram-mib", "2000")
    assert f"{slower}--kernels torch\n" in planned(*here, "--kernels", "torch")
    reason = "it computes in float32, not in bfloat16"
    assert f"{slower}{reason}\n" in planned(*here, "--dtype", "bfloat16")
    monkeypatch.setattr("engine.native.abi.why_unavailable", lambda: "it is not built")
    assert f"{slower}it is not built\n" in planned(*here)
    monkeypatch.setattr("engine.native.abi.why_unavailable", lambda: None)
    reason = "what the compiled step holds hangs on how weights are stored; there are none"
    cpu = ("--device", "cpu", "--ram-mib", "900000", "--batch", "1", "--max-context", "1000")
    assert f"{slower}{reason}\n" in planned(real, *cpu)


def test_every_stage_of_several_gpus_is_planned(real: str) -> None:
    text = planned(real, *GPU, "--batch", "2", "--batch-groups", "2", "--ple-io", "direct")
    first, second = text.split("stage of layers ")[1:]
    assert first.startswith("0 to 29") and second.startswith("30 to 47")
    experts = [bytes_of("experts, 4 bits", stage) for stage in (first, second)]
    assert experts == [n * 512 * 4_915_200 * 33 // 64 for n in (30, 18)]
    assert "drafts off" in first and "drafts on" in second
    assert "draft layer" not in first and "draft layer" in second
    pieces = [bytes_of("streams between stages", stage) for stage in (first, second)]
    assert pieces == [2 * 2048 * 10_240 * 2] * 2


def test_a_pool_that_is_left_out_is_not_planned(real: str) -> None:
    small = (*GPU, "--vram-mib", "24000", "--ple-io", "direct")
    assert "experts' pool" in planned(real, *small)
    assert "experts' pool" not in planned(real, *small, "--pool-workers", "0")


def test_auto_prints_how_the_slots_came_about(real: str) -> None:
    text = planned(real, *BIG, "--ple-io", "mmap", "--vram-reserve-mib", "1600")
    found = re.search(
        r"expert cache auto: [\d.]+ GiB free, 1600 MiB reserved \(\+\d+ MiB for the prompt path, "
        r"\+\d+ MiB for the draft head\) -> (\d+) slots",
        text,
    )
    assert found
    left = re.search(r"GPU memory: .* ([\d.,]+) MiB left", text)
    assert left
    # What is left is the reserve, and less than one expert that did not fit.
    assert 1600 <= float(left[1].replace(",", "")) < 1600 + 4_915_200 * 2 / 2**20


def test_what_does_not_fit_is_refused_with_both_numbers(real: str) -> None:
    # Slots on the device do not spare the host its copy; fewer of them would not either.
    with pytest.raises(
        PlanRefused, match=r"needs \d+ MiB of RAM but 100000 MiB .* experts beside the device's"
    ):
        planned(real, *BIG, "--ram-mib", "100000")
    with pytest.raises(PlanRefused, match=r"one slot needs .* MiB are free: .* --max-context"):
        planned(real, *BIG, "--vram-mib", "8000", "--ram-mib", "400000", "--batch", "4", "--ssd")
    with pytest.raises(PlanRefused, match=r"--expert-cache 9000: .* give at most \d+, or auto"):
        planned(real, *BIG, "--ssd", "--expert-cache", "9000")


def test_the_shipped_model_fits_in_a_little_memory_and_not_in_less() -> None:
    text = planned("default", "--ram-mib", "400", "--dtype", "float32")
    assert "experts: all 256 in memory" in text
    torch_layers = planned("default", "--ram-mib", "500", "--kernels", "torch")
    assert "experts: all 256 on the device, computed all together" in torch_layers
    assert bytes_of("ple table", text) > 0
    assert "ple table" not in planned("--ram-mib", "400", "--ple-io", "direct").split("\n\n")[0]
    with pytest.raises(PlanRefused, match=r"needs \d+ MiB of RAM but 100 MiB .*sessions"):
        planned("--ram-mib", "100", "--dtype", "float32")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--vram-mib", "abc"),
        ("--vram-mib", "1e9"),
        ("--ram-mib", "0"),
        ("--ram-mib", "NaN"),
        ("--batch", "5"),
        ("--expert-cache", "-1"),
        ("--expert-cache", "some"),
        ("--prefill", "0"),
        ("--ple-io", "disk"),
        ("--kv", "q4_0"),
    ],
)
def test_bad_values_end_with_status_2(option: str, value: str) -> None:
    result = runner.invoke(app, ["plan", option, value])
    assert result.exit_code == 2
    assert option in result.output
