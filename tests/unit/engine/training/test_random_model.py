"""The larger model of the benchmark is one that can be loaded, and as much larger as it says."""

from __future__ import annotations

import json
import math

from engine.config import model_path
from engine.geometry import model_tensors
from engine.model_spec import spec_from_config
from engine.training.random_model import wider


def test_it_has_three_to_four_times_the_weights() -> None:
    config = json.loads((model_path("default") / "config.json").read_text(encoding="utf-8"))
    small, large = (
        {fact.name: fact.shape for fact in model_tensors(spec_from_config(c, name="x"))}
        for c in (config, wider(config))
    )
    assert small.keys() == large.keys()
    sizes = [sum(map(math.prod, model.values())) for model in (small, large)]
    assert 3 < sizes[1] / sizes[0] <= 4
