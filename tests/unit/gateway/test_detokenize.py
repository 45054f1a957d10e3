from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.detokenize import Detokenizer, StopMatcher, hold_from
from gateway.tokenizer import ControlToken
from scheduler.messages import TokenLogprobs
from tests.conformance.live import default_files

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SPLITS = st.lists(st.integers(1, 6), max_size=80)


def pieces(items: list[int], sizes: list[int]) -> list[list[int]]:
    """The items in runs of the given sizes, what is left one by one."""
    result: list[list[int]] = []
    position = 0
    for size in sizes:
        result.append(items[position : position + size])
        position += size
    result += [[item] for item in items[position:]]
    return [piece for piece in result if piece]


def run(detokenizer: Detokenizer, parts: list[list[int]]) -> str:
    text = "".join(detokenizer.push(part).text for part in parts)
    return text + detokenizer.finish().text


class SpaceTokenizer:
    """Sentencepiece-like: every id is a word with a space before it; 9 is one byte of two."""

    control_tokens: tuple[ControlToken, ...] = ()
    strips_first_space = True

    @property
    def most_chars_per_token(self) -> int:
        return 100

    def encode_text(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def token_bytes(self, token_id: int) -> bytes:
        return {8: b"\xc3", 9: b"\xa9"}.get(token_id, f" w{token_id}".encode())

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


@QUICK
@given(text=st.text(max_size=60), sizes=SPLITS)
def test_any_split_of_ids_gives_the_whole_text(text: str, sizes: list[int]) -> None:
    tokenizer = default_files().tokenizer
    ids = tokenizer.encode_text(text)
    assert run(Detokenizer(tokenizer), pieces(ids, sizes)) == default_files().decode(ids)


@QUICK
@given(ids=st.lists(st.integers(0, 8191), max_size=60), sizes=SPLITS)
def test_any_split_of_random_ids_gives_the_same_text(ids: list[int], sizes: list[int]) -> None:
    tokenizer = default_files().tokenizer
    whole = run(Detokenizer(tokenizer), [ids])
    assert run(Detokenizer(tokenizer), pieces(ids, sizes)) == whole == default_files().decode(ids)


def test_text_equals_the_tokenizers_own_decoding() -> None:
    from tokenizers import Tokenizer as HfTokenizer

    from scheduler.config import model_path

    full = HfTokenizer.from_file(str(model_path("default") / "tokenizer.json"))
    text = "Zażółć gęślą jaźń, 日本語 and 👩‍👩‍👧 \n\n\tx=1"
    ids = full.encode(text).ids
    assert default_files().decode(ids) == full.decode(ids) == text


def test_half_a_character_is_held_back_and_replaced_at_the_end() -> None:
    tokenizer = default_files().tokenizer
    smile = "😀".encode()
    ids = [
        token_id
        for byte in smile
        for token_id in range(8192)
        if tokenizer.token_bytes(token_id) == bytes([byte])
    ]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token_id]).text for token_id in ids] == ["", "", "", "😀"]
    assert detokenizer.push(ids[:2]).text == ""
    assert detokenizer.finish().text == "\ufffd"


def test_the_first_space_of_sentencepiece_text_is_dropped_once() -> None:
    detokenizer = Detokenizer(SpaceTokenizer())
    assert [detokenizer.push([token_id]).text for token_id in (1, 2)] == ["w1", " w2"]
    assert detokenizer.push([8]).text == ""
    assert detokenizer.push([9]).text == "é"


@QUICK
@given(
    text=st.text(alphabet="ab", max_size=40),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
    sizes=SPLITS,
)
def test_stops_cut_the_same_place_however_the_text_is_split(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    expected = text
    for end in range(1, len(text) + 1):
        found = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            expected = text[: end - max(found)]
            break
    matcher = StopMatcher(tuple(stops))
    released = ""
    for part in pieces([ord(char) for char in text], sizes):
        if matcher.found:
            break
        released += matcher.push("".join(map(chr, part)))
        assert expected.startswith(released)
    if not matcher.found:
        released += matcher.finish()
    assert released == expected
    assert matcher.num_released == len(expected)


def test_tokens_and_logprobs_behind_a_stop_are_neither_kept_nor_counted() -> None:
    tokenizer = default_files().tokenizer
    ids = tokenizer.encode_text("one STOP two three")
    logprobs = [TokenLogprobs(logprob=-float(index), top=()) for index in range(len(ids))]
    detokenizer = Detokenizer(tokenizer, ("STOP",))
    delta = detokenizer.push(ids, logprobs)
    assert delta.text == "one "
    assert detokenizer.stopped
    text = "".join(tokenizer.token_bytes(token.id).decode() for token in delta.tokens)
    assert text.startswith("one")
    assert "OP" not in text  # " ST" begins before the stop and stays
    assert "two" not in text
    completing = default_files().decode(ids[: detokenizer.num_tokens])
    assert completing.startswith("one STOP")
    assert "two" not in completing
    assert detokenizer.finish().text == ""


@QUICK
@given(text=st.text(max_size=30), sizes=SPLITS)
def test_every_token_is_delivered_once_with_its_offset(text: str, sizes: list[int]) -> None:
    tokenizer = default_files().tokenizer
    ids = tokenizer.encode_text(text)
    detokenizer = Detokenizer(tokenizer, ("\x00never",))
    tokens = []
    for part in pieces(ids, sizes):
        delta = detokenizer.push(part, [TokenLogprobs(logprob=-1.0, top=())] * len(part))
        tokens += delta.tokens
    tokens += detokenizer.finish().tokens
    assert [token.id for token in tokens] == ids
    assert [token.text_offset for token in tokens] == sorted(token.text_offset for token in tokens)


def test_hold_from_finds_the_longest_beginning() -> None:
    assert hold_from("xaab", "aabc") == 1
    assert hold_from("xaa", "aabc") == 1
    assert hold_from("x", "aabc") == 1
    assert hold_from("", "a") == 0
    assert hold_from("aaaa", "aab") == 2
