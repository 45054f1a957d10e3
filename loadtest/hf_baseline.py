"""What Hugging Face transformers makes of the same weights: a program of its own, started by loadtest.bench.

    python loadtest/hf_baseline.py engine/default_model --dtype float32

Prints one line of JSON. The trunk alone, as transformers has no draft layer for this family; greedy, one token a
call with its own cache, which is faster than its generate().
"""

# transformers is untyped where it matters here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

_SCALE = "_scale"


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """Qwen4ExpForCausalLM with the checkpoint's weights; int8 tensors are multiplied by their row scales."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    plain = {
        name: _dequantised(name, tensor, tensors)
        for name, tensor in tensors.items()
        if not name.startswith("mtp.") and not name.endswith(_SCALE)
    }
    with tempfile.TemporaryDirectory() as temporary:
        save_file(plain, Path(temporary) / "model.safetensors", metadata={"format": "pt"})
        (Path(temporary) / "config.json").write_text(json.dumps(config))
        loader: Any = transformers.Qwen4ExpForCausalLM
        model, info = loader.from_pretrained(temporary, dtype=dtype, output_loading_info=True)
    wrong = {name: sorted(keys) for name, keys in info.items() if keys and "keys" in name}
    if wrong:
        raise SystemExit(f"transformers did not take the weights: {wrong}")
    return model.eval()


def _dequantised(name: str, tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    if tensor.dtype == torch.int8:
        return tensor.float() * tensors[name + _SCALE].unsqueeze(-1)
    return tensor.float() if tensor.is_floating_point() else tensor


@torch.inference_mode()
def decode_rate(model: Any, ids: list[int], num_tokens: int) -> float:
    """Tokens per second after the first."""
    output = model(input_ids=torch.tensor([ids]), use_cache=True)
    token = output.logits[:, -1:].argmax(-1)
    start_s = time.perf_counter()
    for _ in range(num_tokens):
        output = model(input_ids=token, cache=output.cache, use_cache=True)
        token = output.logits[:, -1:].argmax(-1)
    return num_tokens / (time.perf_counter() - start_s)


@torch.inference_mode()
def prefill_rate(model: Any, ids: list[int]) -> float:
    """Prompt tokens per second, the head for the last one only."""
    start_s = time.perf_counter()
    model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1)
    return len(ids) / (time.perf_counter() - start_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--text", required=True, help="prompt; repeated to the length needed")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    model = load_model(options.model, getattr(torch, options.dtype))
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(options.text).ids
    long = (ids * (options.prompt_tokens // len(ids) + 1))[: options.prompt_tokens]
    decode_rate(model, ids, 4)  # first calls set up more than they compute
    prefill_rate(model, long)
    result = {
        "decode_tokens_per_s": [
            decode_rate(model, ids, options.tokens) for _ in range(options.runs)
        ],
        "prefill_tokens_per_s": [prefill_rate(model, long) for _ in range(options.runs)],
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(result))  # noqa: T201 - the program's result


if __name__ == "__main__":
    main()
