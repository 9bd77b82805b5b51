"""``python -m pediag``."""

from __future__ import annotations

import sys

from pediag.cli import main

if __name__ == "__main__":
    sys.exit(main())
