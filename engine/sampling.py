"""Logits -> ids, by Gumbel-max with counter-based noise (product.md D2).

A pick depends on its row's logits, its request's parameters and history, and its absolute position: never on other rows
or on which drafts were tried. The draft layer picks with the same noise. Oracle: engine/reference/sampling.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engine.interface import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from engine.grammar import RowLimit

_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_NARROW = 1024
"""Largest top_k that is found by selection instead of a full sort."""
_NEG_INF = float("-inf")
_GREEDY = -1
"""Group of greedy rows, in place of a top_k."""


@dataclass(slots=True)
class TokenHistory:
    """Which ids a sequence has, for penalties. seen: bool [vocab], prompt and output; counts: fp32 [vocab], output."""

    seen: Tensor
    counts: Tensor

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether any penalty is on."""
        return (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )

    @staticmethod
    def empty(vocab_size: int, device: torch.device) -> TokenHistory:
        """A history without ids."""
        return TokenHistory(
            seen=torch.zeros(vocab_size, dtype=torch.bool, device=device),
            counts=torch.zeros(vocab_size, dtype=torch.float32, device=device),
        )

    def add_prompt(self, ids: Sequence[int]) -> None:
        """Record prompt ids."""
        self.seen[torch.tensor(ids, dtype=torch.int64, device=self.seen.device)] = True

    def add_output(self, ids: Sequence[int]) -> None:
        """Record output ids."""
        if self.seen.device.type == "cpu":
            self._add_on_host(ids)
            return
        at = torch.tensor(ids, dtype=torch.int64, device=self.seen.device)
        self.seen[at] = True
        self.counts.index_add_(0, at, torch.ones_like(at, dtype=torch.float32))

    def _add_on_host(self, ids: Sequence[int]) -> None:
        # One to five ids a window: tensor operations would take longer than picking them, and allocate.
        seen, counts = self.seen.numpy(), self.counts.numpy()
        for token_id in ids:
            seen[token_id] = True
            counts[token_id] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PickRow:
    """What one row's pick depends on beside its logits."""

    params: SamplingParams
    position: int
    """Absolute position of the token being picked."""
    num_output: int
    """Output tokens before it, drafts of this window included."""
    history: TokenHistory | None
    """Committed ids, when a penalty is on."""
    drafts: tuple[int, ...] = ()
    """Ids of this window between the committed ones and the token being picked."""
    limit: RowLimit | None = None
    """Ids that a grammar or a thinking budget leaves."""

    def ahead(self, num_tokens: int) -> PickRow:
        """The pick so many tokens later, if these change nothing but its place."""
        return replace(
            self, position=self.position + num_tokens, num_output=self.num_output + num_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Picks:
    """One id a row, and its probability among what the row might have picked."""

    ids: list[int]
    probabilities: list[float]
    finite: list[bool] = field(default_factory=list[bool])
    """Whether all of a row's logits are finite numbers; empty unless that was asked for."""


class RowPicker(Protocol):
    """Picks ids for rows of logits."""

    def pick(self, logits: Tensor, rows: Sequence[PickRow], *, check: bool = False) -> Picks:
        """logits fp32 [R, vocab], not changed -> R picks; check: also say which rows are finite.

        A pick's probability is that of the processed logits under the row's temperature and truncation; of a greedy
        row, under temperature 1.
        """
        ...


@dataclass(slots=True)
class Picker:
    """RowPicker of torch operations. num_token_ids: ids from here on have no text and are never picked."""

    num_token_ids: int

    def pick(self, logits: Tensor, rows: Sequence[PickRow], *, check: bool = False) -> Picks:
        """See RowPicker."""
        finite = finite_rows(logits) if check else []
        processed = self._processed(logits, rows)
        ids, probabilities = [0] * len(rows), [0.0] * len(rows)
        groups: dict[tuple[int, bool], list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault(_group(row.params), []).append(i)
        for (top_k, truncated), members in groups.items():
            part = processed if len(members) == len(rows) else processed[members]
            chosen = [rows[i] for i in members]
            if top_k == _GREEDY:
                picked = _picked(part, part.argmax(-1, keepdim=True), None)
            elif truncated:
                picked = _pick_truncated(part, chosen, top_k)
            else:
                picked = _pick_all(part, chosen)
            for i, token_id, probability in zip(members, *picked, strict=True):
                ids[i], probabilities[i] = token_id, probability
        return Picks(ids=ids, probabilities=probabilities, finite=finite)

    def _processed(self, logits: Tensor, rows: Sequence[PickRow]) -> Tensor:
        limited = self.num_token_ids < logits.shape[1]
        changed = [i for i, row in enumerate(rows) if _is_adjusted(row)]
        if not limited and not changed:
            return logits
        logits = logits.clone()
        for i in changed:
            _adjust(logits[i], rows[i])
        if limited:
            logits[:, self.num_token_ids :] = _NEG_INF
        return logits


def finite_rows(logits: Tensor) -> list[bool]:
    """Which rows of logits [R, vocab] are finite numbers only."""
    return torch.isfinite(logits).all(-1).tolist()


def _picked(scaled: Tensor, chosen: Tensor, ids: Tensor | None) -> tuple[list[int], list[float]]:
    """Ids and probabilities of the chosen columns [R, 1] of scaled logits [R, n]; ids [R, n] names the columns."""
    share = scaled.gather(1, chosen) - scaled.logsumexp(-1, keepdim=True)
    found = chosen if ids is None else ids.gather(1, chosen)
    return found.squeeze(1).tolist(), share.exp().squeeze(1).tolist()


def _group(params: SamplingParams) -> tuple[int, bool]:
    """Rows that may be picked together: equal top_k, so that a row's arithmetic has one shape whatever its company."""
    if params.temperature == 0.0:
        return _GREEDY, False
    return params.top_k, params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _is_adjusted(row: PickRow) -> bool:
    return bool(
        row.params.logit_bias
        or row.history is not None
        or row.num_output < row.params.min_tokens
        or row.limit is not None
    )


def _adjust(logits: Tensor, row: PickRow) -> None:
    """Bias, penalties, the ban of stop ids and the row's limit, in place on one row [vocab]."""
    params = row.params
    for token_id, bias in params.logit_bias:
        logits[token_id] += bias
    if row.history is not None:
        _penalize(logits, row.history, params, row.drafts)
    limit = row.limit
    may_stop = row.num_output >= params.min_tokens or (limit and limit.overrules_min_tokens)
    if not may_stop and params.stop_token_ids:
        logits[list(params.stop_token_ids)] = _NEG_INF
    if limit is not None:
        _forbid(logits, limit)


def _forbid(logits: Tensor, limit: RowLimit) -> None:
    """In place on one row [vocab]."""
    if limit.allowed is not None:
        forbidden = torch.from_numpy(~limit.allowed).to(logits.device)
        logits.masked_fill_(forbidden, _NEG_INF)
    if limit.banned:
        logits[list(limit.banned)] = _NEG_INF


def _penalize(
    logits: Tensor, history: TokenHistory, params: SamplingParams, drafts: tuple[int, ...]
) -> None:
    if drafts:
        history = TokenHistory(seen=history.seen.clone(), counts=history.counts.clone())
        history.add_output(drafts)
    if params.repetition_penalty != 1.0:
        factor = params.repetition_penalty
        changed = torch.where(logits > 0, logits / factor, logits * factor)
        logits.copy_(torch.where(history.seen, changed, logits))
    out = history.counts > 0
    logits.sub_(out.to(torch.float32) * params.presence_penalty)
    logits.sub_(history.counts * params.frequency_penalty)


def _pick_all(logits: Tensor, rows: Sequence[PickRow]) -> tuple[list[int], list[float]]:
    """Every id is a candidate."""
    ids = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    scaled = _tempered(logits, rows)
    noisy = scaled + gumbel_noise(rows, ids)
    return _picked(scaled, noisy.argmax(-1, keepdim=True), None)


def _pick_truncated(
    logits: Tensor, rows: Sequence[PickRow], top_k: int
) -> tuple[list[int], list[float]]:
    values, ids = _largest(logits, top_k)
    scaled = _tempered(values, rows)
    probabilities = torch.softmax(scaled, dim=-1)
    before = probabilities.cumsum(-1) - probabilities
    top_p = _column([row.params.top_p for row in rows], logits)
    min_p = _column([row.params.min_p for row in rows], logits)
    kept = (before < top_p) & (probabilities >= min_p * probabilities[:, :1])
    kept[:, 0] = True
    scaled = scaled.masked_fill(~kept, _NEG_INF)
    noisy = scaled + gumbel_noise(rows, ids)
    return _picked(scaled, noisy.argmax(-1, keepdim=True), ids)


def _largest(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The top_k largest logits [R, k] (all when 0) and their ids, falling, equal ones by rising id."""
    vocab = logits.shape[1]
    if 0 < top_k < min(vocab, _NARROW):
        values, ids = logits.topk(top_k + 1, dim=-1)
        # Among equal logits topk keeps any; only when the cut falls between equal ones does that matter.
        if not bool((values[:, top_k - 1] == values[:, top_k]).any()):
            ids, order = ids[:, :top_k].sort(dim=-1)
            values, again = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
            return values, ids.gather(1, again)
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return (values[:, :top_k], ids[:, :top_k]) if top_k else (values, ids)


def _tempered(logits: Tensor, rows: Sequence[PickRow]) -> Tensor:
    """fp64 logits over each row's temperature."""
    return logits.to(torch.float64) / _column([row.params.temperature for row in rows], logits)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(-1)


def gumbel_noise(rows: Sequence[PickRow], ids: Tensor) -> Tensor:
    """fp64 Gumbel noise of ids int64 [R, n], keyed by (seed, position, id)."""
    keys = [_signed(row_key(row.params.seed, row.position)) for row in rows]
    key = torch.tensor(keys, dtype=torch.int64, device=ids.device).unsqueeze(-1)
    bits = _mixed(key + (ids + 1) * _signed(_GAMMA))
    # 52 bits, not 53: the half would be rounded away from the largest, and u = 1 has infinite noise.
    uniform = (_shifted(bits, 12).to(torch.float64) + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def row_key(seed: int, position: int) -> int:
    """The 64-bit key of one row's noise."""
    return _mixed_int((seed + _GAMMA * (position + 1)) & _MASK64)


def row_logprobs(logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of one row [vocab] of unprocessed logits."""
    logprobs = torch.log_softmax(logits, dim=-1)
    top = logprobs.topk(num_top) if num_top else None
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True) if top else ()
    return TokenLogprobs(logprob=float(logprobs[token_id]), top=tuple(pairs))


def _mixed_int(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK64
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK64
    return z ^ (z >> 31)


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shifted(z, 27)) * _signed(_MIX_2)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift: int64 is signed here, so the copies of the sign are cut off."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
