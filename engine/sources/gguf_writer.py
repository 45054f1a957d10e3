"""A checkpoint as a GGUF file, through the gguf library: for other engines and for comparison with them.

Values are kept exactly, unless Q8_0 is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from engine.sources.ggml_export import GgmlExport
from engine.sources.gguf_metadata import ARCHITECTURE, metadata_from_spec
from engine.sources.gguf_text import text_metadata
from engine.sources.widened import widened

if TYPE_CHECKING:
    from engine.model_spec import ModelSpec
    from engine.sources.base import TensorSource

_WIDE = ("ple.layer_multipliers", "ple.head_offsets", "ple.head_vocab_sizes")


def write_gguf(
    source: TensorSource,
    spec: ModelSpec,
    text_directory: Path,
    target: Path,
    *,
    q8: bool = False,
    tensors_per_shard: int = 0,
    progress: Callable[[str, int, int], None] = lambda _name, _done, _total: None,
) -> None:
    """Write every tensor of a source.

    text_directory: where tokenizer.json and chat_template.jinja lie, if there are any. q8: as llama.cpp wants it, int8
    rows as Q8_0 and the n-gram embedding as wide as the residual. tensors_per_shard: 0 writes one file. progress:
    called with a tensor's name and with bytes done and in all.
    Raises ConfigMismatch for a model that the format cannot describe.
    """
    if q8:
        source, spec = widened(source, spec)
    described = {
        **{f"{ARCHITECTURE}.{key}": value for key, value in metadata_from_spec(spec).items()},
        **text_metadata(text_directory, spec.vocab_size),
    }
    writer = GGUFWriter(target, ARCHITECTURE, split_max_tensors=tensors_per_shard)
    writer.add_name(spec.name)
    add_metadata(writer, described)
    tensors = tuple(GgmlExport(source, spec).tensors(for_gguf=True, q8=q8))
    for tensor in tensors:
        kind = GGMLQuantizationType(tensor.kind.number)
        # The dtype only says that the shape is one of values and not of bytes.
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, raw_dtype=kind
        )
    writer.write_header_to_file(path=target)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    done, total = 0, sum(tensor.num_bytes for tensor in tensors)
    for tensor in tensors:
        progress(tensor.name, done, total)
        done += tensor.num_bytes
        writer.write_tensor_data(tensor.data(0, tensor.shape[0]).numpy())
    writer.close()


def add_metadata(writer: GGUFWriter, metadata: Mapping[str, Any]) -> None:
    """Add values under keys in full, in the types that readers of the format expect."""
    for key, value in metadata.items():
        match value:
            case str():
                writer.add_string(key, value)
            case float():
                writer.add_float32(key, value)
            case int():
                writer.add_uint32(key, value)
            case _ if key.endswith(_WIDE):
                writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=GGUFValueType.UINT64)
            case _:
                writer.add_array(key, value)
