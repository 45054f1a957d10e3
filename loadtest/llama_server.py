"""How llama.cpp's server is started as a rival: on a GGUF file of the same model, with the same seats and sampling."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_SAMPLING = {
    "temperature": "--temp",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "repetition_penalty": "--repeat-penalty",
}
_NUM_SLOTS = 4
_FIXED = (
    *("--min-p", "0", "--parallel", str(_NUM_SLOTS)),
    *("--reasoning", "off", "--offline", "--no-webui"),
)
# Its own draft layer, with our chain length and gate.
DRAFTS = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "4", "--spec-draft-p-min", "0.5")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaServer:
    """An executable `llama-server` and a file that it can load."""

    executable: Path
    file: Path

    def command(self, model: Path, threads: int | None) -> tuple[str, ...]:
        """All but the port. model: the checkpoint directory that the file was made of; four slots have its context."""
        config = json.loads((model / "config.json").read_text())
        context = config["max_position_embeddings"]
        command = [str(self.executable), "--model", str(self.file), *_FIXED]
        # Repetition is penalised over the whole text, as here.
        command += ["--ctx-size", str(_NUM_SLOTS * context), "--repeat-last-n", str(context)]
        if threads is not None:
            command += ["--threads", str(threads)]
        sampling = json.loads((model / "generation_config.json").read_text())
        for name, option in _SAMPLING.items():
            if name in sampling:
                command += [option, str(sampling[name])]
        return tuple(command)
