"""Entry point: `stratagate` and `python -m gateway`."""

from __future__ import annotations

from gateway.cli import app


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
