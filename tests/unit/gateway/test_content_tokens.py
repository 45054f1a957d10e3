from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.content_tokens import ContentSpans, ContentTokens
from gateway.detokenize import OutputToken
from gateway.output_parser import OutputParser
from gateway.tools import Tool
from scheduler.messages import TokenLogprobs

NOW = Tool(name="now", declaration={"type": "function", "function": {"name": "now"}})
PIECES = "<think> </think> <tool_call> </tool_call> <function=now> </function> x < </ a<tool_ call>".split()
SPACES = ["\n", " ", "", "y z"]


def tokens_of(pieces: list[str]) -> list[OutputToken]:
    tokens: list[OutputToken] = []
    place = 0
    for index, piece in enumerate(pieces):
        logprobs = TokenLogprobs(logprob=0.0, top=())
        end = place + len(piece)
        tokens.append(OutputToken(id=index, logprobs=logprobs, text_offset=place, text_end=end))
        place = end
    return tokens


def content_and_ids(pieces: list[str], sizes: list[int], tools: bool) -> tuple[str, list[int]]:
    spans = ContentSpans()
    parser = OutputParser(in_thought=False, tools=(NOW,) if tools else (), spans=spans)
    tracker = ContentTokens(spans)
    content, ids = "", list[int]()
    rest = list(zip(pieces, tokens_of(pieces), strict=True))
    for size in (*sizes, len(rest)):
        now, rest = rest[:size], rest[size:]
        content += parser.push("".join(piece for piece, _ in now)).content
        ids += [token.id for token in tracker.push([token for _, token in now], is_last=False)]
    content += parser.finish().content
    ids += [token.id for token in tracker.push([], is_last=True)]
    return content, ids


@settings(deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES + SPACES), max_size=10),
    sizes=st.lists(st.integers(0, 4), max_size=6),
    tools=st.booleans(),
)
def test_any_split_gives_the_tokens_whose_characters_are_content(
    pieces: list[str], sizes: list[int], tools: bool
) -> None:
    content, ids = content_and_ids(pieces, sizes, tools)
    assert (content, ids) == content_and_ids(pieces, [], tools)
    assert ids == sorted(set(ids))
    # Every character of the content is some token's, and a token with none of them is not among them.
    said = "".join(pieces[index] for index in ids)
    rest = iter(said)
    assert all(char in rest for char in content)
    marked = {i for i, piece in enumerate(pieces) if piece and set(piece) & set(content)}
    assert {i for i in ids if pieces[i]} <= marked


def test_a_token_without_characters_belongs_to_the_next_character() -> None:
    assert content_and_ids(["<think>", "", "x", "</think>", "", "é"], [], True) == ("é", [4, 5])
