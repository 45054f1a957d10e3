"""The seam between scheduler and engine: frozen messages of ids and numbers, and the Engine protocol.

Holds no tensor and imports no torch, so that messages can cross a process border (product.md D5).
A *slot* is a seat in the batch; a *window* is one draft, verify, accept round over all slots. Messages made for every
slot of every window are Structs, which are made and read ten times as fast as frozen dataclasses; on the wire they are
arrays without their fields' names, and as nothing in them can refer back the garbage collector need not look at them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

MAX_SPEC = 4
"""Longest draft chain: a verify window has at most MAX_SPEC + 1 rows per slot (product.md D1)."""

MAX_SLOTS = 4
"""Most seats of the batch: a window's rows are MAX_SLOTS * (MAX_SPEC + 1) at most."""

PAGE_TOKENS = 64
"""Positions of one parked page."""

MAX_TOP_LOGPROBS = 20
"""Most alternatives a row may report."""


class GrammarKind(StrEnum):
    """What a grammar's text is."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    """The whole text matches."""
    GRAMMAR = "grammar"
    """GBNF (llama.cpp's) or Lark, told apart by its look."""
    LARK = "lark"
    """llguidance's Lark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the answer must match, from the end of the thought to the end of the sequence."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """How to tell a thought from the answer behind it, and how long it may be."""

    is_open: bool
    """The prompt has opened it."""
    open_id: int | None
    """As the first output id it opens a thought; None: none can open any more."""
    close_id: int
    closing_ids: tuple[int, ...]
    """What is dictated once the budget is spent; close_id and what the format has around it."""
    budget: int | None = None
    """Ids of a thought, its marks not counted."""
    leaving_ids: tuple[int, ...] = ()
    """Ids that end the thought as well; with a grammar they cannot come in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one sequence's tokens are picked. Constant for the life of the sequence.

    A pick at absolute position p is the argmax over processed logits + Gumbel noise keyed by (seed, p, token id);
    temperature 0 is the case without noise (product.md D2). Logits are processed in this order: logit_bias,
    repetition penalty (prompt and output), presence and frequency penalties (output only), ban of stop ids while
    fewer than min_tokens are out, grammar and thinking budget, temperature, top_k, top_p, min_p.
    """

    temperature: float = 1.0
    """0 is greedy; otherwise > 0."""
    top_k: int = 0
    """Keep the k largest logits; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of largest probabilities whose sum reaches top_p, in (0, 1]."""
    min_p: float = 0.0
    """Drop ids whose probability is below min_p times the largest, in [0, 1]."""
    seed: int = 0
    """0 <= seed < 2**64."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """> 0; 1 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias) pairs with distinct ids."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the sequence; the engine keeps nothing accepted after one."""
    min_tokens: int = 0
    """Stop ids cannot be picked before this many output tokens."""
    top_logprobs: int | None = None
    """None: no logprobs; n: the picked id's logprob and the n best alternatives, 0 <= n <= MAX_TOP_LOGPROBS."""
    grammar: Grammar | None = None
    """Rows behind the thought pick only what the grammar allows; at its end only stop ids, min_tokens or not."""
    thought: Thought | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Parked state to begin from: a checkpoint and the pages below its position.

    After a checkpoint of a prompt piece, token_ids are the ids of its positions and the next work is a chunk. After a
    checkpoint of a suspended sequence they also hold its last picked id, num_output of them are output, and the next
    work is a decode step.
    """

    checkpoint_id: int
    page_ids: tuple[int, ...]
    """One per PAGE_TOKENS positions, in order; the last may be partly filled."""
    token_ids: tuple[int, ...]
    num_output: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStart:
    """Seat a sequence in a slot, clearing what was there: a new one at position 0, or a parked one."""

    slot: int
    sampling: SamplingParams
    resume: Resume | None = None
    uses_drafts: bool = True
    """False spares the draft layer's cells for a sequence that will never draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Read prompt ids at positions [start, start + len(token_ids)) of a slot.

    `start` must equal the slot's number of computed tokens. When `is_last`, the row of the last id is sampled and
    the result carries the sequence's first output token.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    is_last: bool
    checkpoint_id: int | None = None
    """Keep the running state after this piece under a new id."""


class DecodeStep(Struct, frozen=True, kw_only=True, gc=False, array_like=True):
    """Draft at most `max_draft` tokens for a slot and verify them together with its last sampled token.

    The chain ends before the first draft whose draft-layer probability is below `spec_min_p`. The result has
    1 to max_draft + 1 new tokens, so max_draft must be below the number of tokens still wanted.
    """

    slot: int
    max_draft: int
    spec_min_p: float
    next_draft: int = 0
    """How many drafts the slot's next window will likely want, so that they can be made while this one's answer is on
    its way. Nothing else depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspend:
    """Keep a decoding sequence's running state under a new id, so that it can go on later as if never stopped."""

    slot: int
    checkpoint_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePage:
    """Keep the slot's cells [index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS) under a new id."""

    slot: int
    page_id: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCheckpoint:
    """A checkpoint of a conversation file: its position, and a digest of the owner and all tokens before it."""

    position: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFile:
    """A conversation file that is there."""

    file_id: str
    num_bytes: int
    checkpoints: tuple[KeptCheckpoint, ...]
    """By position; empty: it was written for another model, or by another version, and can only be deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFile:
    """Write parked state to a new file, beside the windows. Until the answer, its ids must not be dropped."""

    file_id: str
    checkpoints: tuple[KeptCheckpoint, ...]
    checkpoint_ids: tuple[int, ...]
    page_ids: tuple[int, ...]
    """All positions up to the last checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFile:
    """Read the beginning of a file to new ids, beside the windows. Until the answer they must not be used or dropped.

    Whatever the answer is, the ids are there then and must be dropped some time.
    """

    file_id: str
    checkpoints: tuple[KeptCheckpoint, ...]
    """The file's first ones."""
    checkpoint_ids: tuple[int, ...]
    page_ids: tuple[int, ...]
    """All positions up to the last of these checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDone:
    """A file was written or read, or could not be: then it is not there any more."""

    file_id: str
    is_write: bool
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """One call's work. A slot appears at most once in chunks + decodes, and not at all while it is in flight.

    An empty one only waits for slots in flight.

    In this order: parked pages and checkpoints are dropped, sequences suspended, pages saved, file work begun,
    sequences started, chunks read one after the other, each by itself, and all decodes run as one batch. File work is
    done in the order given (deleted, written, read), and behind that of earlier windows.
    """

    drop_page_ids: tuple[int, ...] = ()
    drop_checkpoint_ids: tuple[int, ...] = ()
    suspends: tuple[Suspend, ...] = ()
    saves: tuple[SavePage, ...] = ()
    drop_file_ids: tuple[str, ...] = ()
    writes: tuple[WriteFile, ...] = ()
    reads: tuple[ReadFile, ...] = ()
    waits_for_files: bool = False
    """There is nothing else to do: return when some file work is done, or after a moment."""
    starts: tuple[SlotStart, ...] = ()
    chunks: tuple[PrefillChunk, ...] = ()
    decodes: tuple[DecodeStep, ...] = ()


class TokenLogprobs(Struct, frozen=True, kw_only=True, gc=False, array_like=True):
    """Log-probabilities of one row under the softmax of the unprocessed logits."""

    logprob: float
    """Of the picked id."""
    top: tuple[tuple[int, float], ...]
    """(id, logprob) of the best alternatives, best first."""


class SlotTokens(Struct, frozen=True, kw_only=True, gc=False, array_like=True):
    """New output tokens of one slot: accepted drafts, then the target's own next pick (the bonus)."""

    slot: int
    token_ids: tuple[int, ...]
    """1 to num_drafted + 1 ids; the last one is a stop id if a stop was picked."""
    num_drafted: int
    """Drafts that entered the verify window."""
    num_accepted: int
    """Drafts equal to the target's pick, before any cut at a stop id."""
    logprobs: tuple[TokenLogprobs, ...] | None
    """One per token id when asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFailure:
    """A slot whose rows cannot be used (for example non-finite logits); the others of the window are good."""

    slot: int
    message: str
    is_grammar: bool = False
    """What the sequence's own grammar asks for cannot be followed."""


class WindowTimes(Struct, frozen=True, kw_only=True):
    """Wall-clock seconds of the parts of a window, for adapting depth and share."""

    prefill_s: float
    draft_s: float
    verify_s: float
    ahead_s: float = 0.0
    """What of draft_s had passed before the window was asked for, or while it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowResult:
    """Answer to one WindowPlan: tokens of every decode step and of every last chunk, but for slots in flight.

    It also has those of slots that were in flight before.
    """

    tokens: tuple[SlotTokens, ...]
    failures: tuple[SlotFailure, ...]
    times: WindowTimes
    files: tuple[FileDone, ...] = ()
    """File work that was done since the last window."""
    in_flight: tuple[int, ...] = ()
    """Slots whose tokens a later window's result has: their decode step, or last chunk, is still on its way through the
    stages of a model that is spread over several devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanItem:
    """One line of the memory plan."""

    name: str
    planned_bytes: int
    actual_bytes: int | None
    """None until allocated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the loaded engine is; constant until it is closed."""

    model_name: str
    vocab_size: int
    """Rows of the head; ids at or above it do not exist."""
    max_context: int
    """Tokens a slot can hold: prompt + output."""
    num_slots: int
    chunk_tokens: int
    """Prompt chunks end at absolute multiples of this, and at turn starts (product.md D3)."""
    max_draft: int
    """0 when the model runs without its draft layer."""
    device: str
    dtype: str
    kernels: str
    """Which arithmetic was chosen at start, one readable line."""
    load_s: float
    memory_plan: tuple[PlanItem, ...]
    reads_as_decodes: bool = False
    """State computed by decoding is, bit for bit, state computed by reading (product.md D3, rule 3)."""
    kv_dtype: str = "none"
    """What keys and values are held in; none: there are none."""
    page_bytes: int = 0
    """Host bytes of a parked page."""
    checkpoint_bytes: int = 0
    """Host bytes of a parked checkpoint."""
    keeps_files: bool = False
    """Whether there is a directory for conversation files."""
    files: tuple[KeptFile, ...] = ()
    """What is in it; those used longest ago come first."""


class Engine(Protocol):
    """The engine core as the scheduler's process sees it. Synchronous; one caller, one window at a time."""

    @property
    def info(self) -> EngineInfo:
        """Facts of the loaded model."""
        ...

    def run_window(self, plan: WindowPlan) -> WindowResult:
        """Run one window. Raises PlanError for a plan that contradicts the slots' state, EngineError else."""
        ...

    def work_ahead(self) -> None:
        """Begin what the next window will likely need; called when a window is answered. May do nothing.

        Raises EngineError when the engine is beyond use.
        """
        ...

    def close(self) -> None:
        """Free everything; the engine cannot be used afterwards."""
        ...
