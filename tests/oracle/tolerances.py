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
