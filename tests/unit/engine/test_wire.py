"""Messages survive the wire unchanged; nothing else comes off it."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.fake import FakeScript, Fault, FaultKind
from engine.interface import (
    DecodeStep,
    EngineInfo,
    PlanItem,
    PrefillChunk,
    SamplingParams,
    SlotFailure,
    SlotStart,
    SlotTokens,
    TokenLogprobs,
    WindowPlan,
    WindowResult,
    WindowTimes,
)
from engine.wire import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    Close,
    FrameReader,
    Load,
    LoadFailed,
    LogLine,
    Message,
    Ready,
    RunWindow,
    WindowDone,
    WindowFailed,
    WireError,
    decode,
    encode,
    payload_length,
)

SAMPLING = SamplingParams(
    temperature=0.7,
    seed=2**64 - 1,
    logit_bias=((3, -100.0), (4, 0.5)),
    stop_token_ids=(1, 2),
    top_logprobs=0,
)
MESSAGES: tuple[Message, ...] = (
    Load(config=EngineConfig(model="/models/x", threads=None), scripted=None),
    Load(
        config=EngineConfig(),
        scripted=FakeScript(faults=(Fault(window=3, kind=FaultKind.SLOT, slot=2),)),
    ),
    RunWindow(
        plan=WindowPlan(
            starts=(SlotStart(slot=1, sampling=SAMPLING),),
            chunks=(PrefillChunk(slot=1, start=0, token_ids=(5, 262143), is_last=False),),
            decodes=(DecodeStep(slot=0, max_draft=4, spec_min_p=0.5),),
        )
    ),
    Close(),
    LogLine(level=20, text="é\n"),
    Ready(
        info=EngineInfo(
            model_name="m",
            vocab_size=1,
            max_context=2,
            num_slots=3,
            chunk_tokens=4,
            max_draft=0,
            page_bytes=2**20,
            checkpoint_bytes=2**27,
            device="cpu",
            dtype="float32",
            kernels="",
            load_s=0.5,
            memory_plan=(PlanItem(name="head", planned_bytes=2**40, actual_bytes=None),),
        )
    ),
    LoadFailed(kind="WeightMismatch", message="x: found, required"),
    WindowDone(
        result=WindowResult(
            tokens=(
                SlotTokens(
                    slot=0,
                    token_ids=(1, 2),
                    num_drafted=4,
                    num_accepted=1,
                    logprobs=(TokenLogprobs(logprob=-0.25, top=((1, -0.25), (7, -3.0))),) * 2,
                ),
            ),
            failures=(SlotFailure(slot=1, message="non-finite"),),
            times=WindowTimes(prefill_s=0.0, draft_s=1e-3, verify_s=2e-3),
        )
    ),
    WindowFailed(kind="PlanError", message="", fatal=False),
)


def off_the_wire(frame: bytes) -> Message:
    assert payload_length(frame[:HEADER_BYTES]) == len(frame) - HEADER_BYTES
    return decode(frame[HEADER_BYTES:])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_equal(message: Message) -> None:
    assert off_the_wire(encode(message)) == message


@given(
    token_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(allow_nan=False),
)
def test_numbers_come_back_equal(token_ids: tuple[int, ...], seed: int, temperature: float) -> None:
    plan = WindowPlan(
        starts=(SlotStart(slot=0, sampling=SamplingParams(seed=seed, temperature=temperature)),),
        chunks=(PrefillChunk(slot=0, start=0, token_ids=token_ids, is_last=True),),
    )
    assert off_the_wire(encode(RunWindow(plan=plan))) == RunWindow(plan=plan)


@given(payload=st.binary(max_size=64))
def test_noise_is_refused_or_a_whole_message(payload: bytes) -> None:
    try:
        message = decode(payload)
    except WireError:
        return
    assert off_the_wire(encode(message)) == message


def test_every_truncation_is_refused() -> None:
    payload = encode(MESSAGES[2])[HEADER_BYTES:]
    for length in range(len(payload)):
        with pytest.raises(WireError):
            decode(payload[:length])


def test_a_field_of_the_wrong_type_is_refused() -> None:
    tag = encode(MESSAGES[4])[HEADER_BYTES]
    body = msgspec.msgpack.encode({"level": "20", "text": "x"})
    with pytest.raises(WireError, match="LogLine"):
        decode(bytes((tag,)) + body)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(WireError, match="unknown kind ff"):
        decode(b"\xff")


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1])
def test_a_length_out_of_range_is_refused(length: int) -> None:
    with pytest.raises(WireError, match=str(length)):
        payload_length(struct.pack(">I", length))


def test_too_large_a_message_is_not_sent() -> None:
    with pytest.raises(WireError, match="LogLine"):
        encode(LogLine(level=0, text="x" * MAX_FRAME_BYTES))


@given(data=st.data())
def test_frames_are_read_however_the_bytes_are_cut(data: st.DataObject) -> None:
    stream = b"".join(map(encode, MESSAGES))
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    reader, read = FrameReader(), list[Message]()
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        read += reader.feed(stream[begin:end])
    assert tuple(read) == tuple(MESSAGES)
