"""The engine's way to end a command, for the gateway."""

from engine.command_line import exit_status

__all__ = ["exit_status"]
