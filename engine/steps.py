"""What the engine calls to compute rows. Torch layers, the compiled CPU step and the CUDA step stand behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from engine.interface import DecodeStep, SamplingParams, WindowTimes
    from engine.sampling import PickRow, Picks, TokenHistory
    from engine.state import KeptRows, Rows, SlotState


class TrunkSteps(Protocol):
    """See engine.model.Trunk, the plainest of them. Results may be overwritten by the next call of the same kind.

    Ids of rows and pieces come on the host, where tables that lie outside the device are read by them.
    """

    @property
    def ngram_context(self) -> int:
        """Ids before a row's own that it is computed from."""
        ...

    def window(self, ids: Tensor, rows: Rows, state: SlotState) -> Tensor: ...
    def chunk(self, ids: Tensor, slot: int, start: int, state: SlotState) -> Tensor: ...
    def logits(self, streams: Tensor) -> Tensor: ...
    def commit(self, kept: Mapping[int, KeptRows], streams: Tensor, state: SlotState) -> None: ...


class PartSteps(TrunkSteps, Protocol):
    """TrunkSteps that can go on where another stage's layers ended: `streams` are theirs, None embeds the ids."""

    def window(
        self, ids: Tensor, rows: Rows, state: SlotState, streams: Tensor | None = None
    ) -> Tensor: ...
    def chunk(
        self, ids: Tensor, slot: int, start: int, state: SlotState, streams: Tensor | None = None
    ) -> Tensor: ...


@runtime_checkable
class StagedSteps(TrunkSteps, Protocol):
    """A compiled trunk whose window can be run in parts, to measure them."""

    @property
    def num_layers(self) -> int: ...

    def stages(self, rows: Rows) -> dict[str, Callable[[], None]]:
        """Parts of the last window, which had these rows, by name: `start`, every kind of layer, `head`."""
        ...


@runtime_checkable
class TimedSteps(TrunkSteps, Protocol):
    """A compiled trunk that times its stages itself."""

    @property
    def num_layers(self) -> int: ...

    def stage_seconds(self, run: Callable[[], object]) -> dict[str, float]:
        """Run something and add up what each stage of the trunk's and the head's calls in it takes."""
        ...


@runtime_checkable
class CountingSteps(TrunkSteps, Protocol):
    """A compiled trunk that counts its routes itself."""

    def count_routes(self, run: Callable[[], object]) -> list[list[int]]:
        """Run something and count the prompt rows that the trunk routes in it: [layers][experts]."""
        ...


class DraftSteps(Protocol):
    """See engine.mtp.DraftLayer."""

    def read_chunk(
        self, ids: Tensor, streams: Tensor, slot: int, start: int, state: SlotState
    ) -> None: ...
    def read_rows(self, ids: Tensor, streams: Tensor, rows: Rows, state: SlotState) -> None: ...
    def draft(
        self, ids: Tensor, streams: Tensor, rows: Rows, last: Tensor, state: SlotState
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class WindowWork:
    """One slot's part of a window that is run in one go."""

    step: DecodeStep
    ids: Sequence[int]
    """Every known id; the last one is not computed yet."""
    num_computed: int
    num_pending: int | None
    """Positions before these whose draft-layer cells wait; None: the sequence never drafts."""


@dataclass(frozen=True, slots=True)
class WindowYield:
    """What one slot's part yielded."""

    token_ids: tuple[int, ...] | None
    """Accepted drafts and the bonus, cut behind a stop id: committed, and counted in the sequence's history. None: the
    logits are not finite numbers, and nothing was committed."""
    num_drafted: int
    num_accepted: int


class WholeWindow(Protocol):
    """Drafts, verifies, picks, accepts and commits in one go, for sequences whose picks depend on nothing but params
    and history: no grammar, no thinking budget, no ban of stop ids, no log-probabilities to report.
    """

    def seat(self, slot: int, params: SamplingParams, history: TokenHistory | None) -> None:
        """A sequence begins in a slot."""
        ...

    def ahead(self, works: Sequence[WindowWork]) -> None:
        """Draft for a window that is still to be asked for, and that may then ask for something else."""
        ...

    def run(self, works: Sequence[WindowWork]) -> tuple[list[WindowYield], WindowTimes]:
        """One window of these slots: what each yielded, and its times. To the bit what the calls for its parts give."""
        ...


class DraftChain(Protocol):
    """Drafts several tokens in one go, picking them itself."""

    def can_pick(self, row: PickRow) -> bool:
        """Whether a chain may begin with such a pick; the others are picked one by one by the engine's RowPicker."""
        ...

    def chain(
        self,
        ids: Tensor,
        streams: Tensor,
        rows: Rows,
        first: Sequence[PickRow],
        steps: Sequence[DecodeStep],
    ) -> list[Picks]:
        """Write the cells of R rows, as DraftSteps.draft, and draft a chain for each of their B slots.

        first: the B first picks; steps: the slots' longest chains and gates. Returns the picks by depth, as many as the
        longest chain. A slot's may end at its gate, after which its picks mean nothing: the caller cuts it there.
        """
        ...
