"""`python -m engine.training prepare | train | export | evaluate | dequantize`."""

from __future__ import annotations

from engine.training.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
