"""The one table of tolerances. A number here may only be made larger by agreement, with its reason beside it."""

from __future__ import annotations

REFERENCE_LOGITS = 5e-5
"""fp32 logits of about 0.7 (standard deviation): the plain reference against Hugging Face."""

ENGINE_LOGITS = 1e-4
"""fp32 logits: the engine against Hugging Face, whatever way the text was read."""

ROLLBACK_LOGITS = 1e-5
"""fp32 logits after rejected drafts, against never having drafted."""

DRAFT_PROBABILITY = 1e-5
"""Probability of a drafted id (about 0.05 in these models), fp32: the engine against the plain reference."""

LOGPROBS = 1e-4
"""Reported log-probabilities against those of the plain reference."""

SELECTION_MARGIN = 1e-4
"""How far apart the last chosen and the first left block must score in the texts used here, so that rounding cannot
change a selection: not a tolerance of the engine but a condition on the texts."""

INT8_KV_MEDIAN_LOGITS = 1e-3
"""Median over rows of the root mean square difference of fp32 logits, int8 K/V against fp32 K/V. Rounding to a grid of
1/127 of a cell's largest value is an error of 0.5 % of the cell in the root mean square; the mean over the attended
cells and the layers without K/V leave 0.04 % to 0.08 % of the logits' 0.7."""

INT8_KV_DIVERGENCE = 1e-4
"""Mean Kullback-Leibler divergence (nats) of the next token's distribution, int8 K/V from fp32 K/V. A rounded cell can
tip a router or a choice of blocks over, which moves one row's logits by up to 0.2: found are 3e-8 to 3e-5 nats."""
