"""The table of `python -m loadtest.bench cpu`: medians of the rounds, and what is compared with what."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

OFF, ON = "without drafts", "with drafts"
LLAMA_OFF, LLAMA_ON = "llama.cpp without drafts", "llama.cpp with drafts"

_RATES = {
    "one_stream_tokens_per_s": "one stream",
    "one_stream_greedy_tokens_per_s": "one stream, greedy",
    "one_client_tokens_per_s": "one client with prompt reading",
    "four_streams_tokens_per_s": "four clients with prompt reading",
    "prefill_tokens_per_s": "prompt reading",
}
_OTHERS = {
    "ttft_ms": "time to first token, short prompt, ms",
    "start_up_s": "start of the process to ready, s",
    "peak_mib": "peak memory, MiB (RSS of all processes)",
}


def markdown(result: dict[str, Any]) -> str:
    """The medians as a table for docs/benchmarks.md, and what is compared."""
    servers: dict[str, list[dict[str, Any]]] = result["servers"]
    figures = {
        name: {key: statistics.median(r[key] for r in rounds) for key in (*_RATES, *_OTHERS)}
        for name, rounds in servers.items()
    }
    labels = {key: f"{label}, tokens/s" for key, label in _RATES.items()} | _OTHERS
    off, on = figures[OFF], figures[ON]
    four = on["four_streams_tokens_per_s"] / on["one_client_tokens_per_s"]
    return "\n".join(
        [
            f"Measured {result['date']} on {result['machine']} (load before the start: "
            f"{result['load_before']:.2f}) with `{result['command']}`.",
            "",
            f"| figure | {' | '.join(figures)} |",
            "|---" * (len(figures) + 1) + "|",
            *(
                f"| {label} | {' | '.join(f'{column[key]:,.1f}' for column in figures.values())} |"
                for key, label in labels.items()
            ),
            "",
            f"With drafts against without: {_ratios(on, off)}.",
            f"Four clients make {four:.2f} times the tokens of one (with drafts).",
            f"Accepted of verified drafts: {_acceptance(servers[ON])}.",
            *(
                f"Ours {ours} against {theirs}: {_ratios(figures[ours], figures[theirs])}."
                for ours, theirs in ((OFF, LLAMA_OFF), (ON, LLAMA_ON))
                if theirs in figures
            ),
            *_same_answers(servers),
            *_transformers(result["transformers"], off),
        ]
    )


def _ratios(ours: dict[str, float], theirs: dict[str, float]) -> str:
    return ", ".join(
        f"{label} {ours[key] / theirs[key]:.2f}x" for key, label in _RATES.items() if theirs[key]
    )


def _same_answers(servers: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """How many greedy answers of the first round are word for word those without drafts."""
    expected: list[str] = servers[OFF][0]["greedy_answers"]
    for name, rounds in servers.items():
        if name != OFF:
            pairs = zip(rounds[0]["greedy_answers"], expected, strict=True)
            same = sum(found == answer for found, answer in pairs)
            yield f"Greedy answers as ours without drafts, {name}: {same} of {len(expected)}."


def _transformers(measured: list[dict[str, Any]], off: dict[str, float]) -> Iterator[str]:
    for dtype in ("float32", "bfloat16"):
        runs = [item for item in measured if item["dtype"] == dtype]
        if runs:
            decode = statistics.median(item["decode_tokens_per_s"][0] for item in runs)
            prefill = statistics.median(item["prefill_tokens_per_s"][0] for item in runs)
            yield (
                f"transformers {runs[0]['transformers']} on torch {runs[0]['torch']}, {dtype}, same weights: "
                f"{decode:,.1f} tokens/s (ours without drafts: {off['one_stream_tokens_per_s'] / decode:.1f}x), "
                f"prompt reading {prefill:,.0f} tokens/s ({off['prefill_tokens_per_s'] / prefill:.1f}x)."
            )


def _acceptance(rounds: list[dict[str, Any]]) -> str:
    """Over all rounds, in all and by depth."""
    sums: dict[str, list[float]] = {}
    for item in rounds:
        for depth, (offered, kept) in item["acceptance"].items():
            total = sums.setdefault(depth, [0.0, 0.0])
            total[0] += offered
            total[1] += kept
    if not sums:
        return "none was verified"
    offered, kept = (sum(total[index] for total in sums.values()) for index in (0, 1))
    depths = ", ".join(
        f"depth {depth}: {total[1] / total[0]:.2f} of {total[0]:,.0f}"
        for depth, total in sorted(sums.items())
    )
    return f"{kept / offered:.2f} in all; {depths}"
