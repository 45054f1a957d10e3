from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.generation import Choice
from gateway.output_parser import OutputParser
from gateway.preparation import PreparedChoice
from gateway.replies import ChoiceText
from scheduler.messages import Tokens
from tests.conformance.live import default_files
from tests.factories import make_request

STOP_ID = 305
THINK_IDS = default_files().think_ids
assert THINK_IDS is not None
IDS = st.sampled_from([*THINK_IDS, STOP_ID, 198, 220]) | st.integers(300, 3000)
NEVER = "\x00"
"""No text of IDS has it, so none is held back for it."""


def choice(*, parses: bool, in_thought: bool, stop: tuple[str, ...]) -> Choice:
    request = make_request(stop_token_ids=(STOP_ID,))
    prepared = PreparedChoice(index=0, request=request, in_thought=in_thought, echo="")
    parser = OutputParser(in_thought=in_thought) if parses else None
    return Choice(prepared, default_files(), stop, parser)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    windows=st.lists(st.lists(IDS, min_size=1, max_size=3), max_size=30),
    parses=st.booleans(),
    in_thought=st.booleans(),
)
def test_plain_text_is_counted_and_told_apart_as_text_that_is_searched(
    windows: list[list[int]], parses: bool, in_thought: bool
) -> None:
    """A stop string that never comes has every token looked at closely, and changes nothing."""
    quick = choice(parses=parses, in_thought=in_thought and parses, stop=())
    close = choice(parses=parses, in_thought=in_thought and parses, stop=(NEVER,))
    texts = ChoiceText(), ChoiceText()
    for ids in windows:
        # The engine keeps nothing behind a stop id.
        end = ids.index(STOP_ID) + 1 if STOP_ID in ids else len(ids)
        event = Tokens(token_ids=tuple(ids[:end]))
        deltas = [one.accept(event) for one in (quick, close)]
        assert deltas[0].num_tokens == deltas[1].num_tokens == end
        for text, delta in zip(texts, deltas, strict=True):
            text.add(delta)
        assert quick.completion_tokens == close.completion_tokens
        assert quick.reasoning_tokens == close.reasoning_tokens
        if STOP_ID in ids:
            break
    for part in ("content", "reasoning"):
        said, searched = ("".join(getattr(text, part)) for text in texts)
        assert said == searched
