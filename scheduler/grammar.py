"""The engine's check of grammars, for the gateway: what compiles here compiles there. No torch."""

from __future__ import annotations

from engine.grammar import GrammarCompiler, GrammarError, json_rule, regex_rule

__all__ = ["GrammarCompiler", "GrammarError", "json_rule", "regex_rule"]
