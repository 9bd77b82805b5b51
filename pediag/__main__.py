"""``python -m pediag``."""

from __future__ import annotations

import os
import sys

HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

if __name__ == "__main__" and sys.path and sys.path[0] in ("", os.getcwd()) and sys.path[0] != HOME:
    # Python looks for modules in the current folder first, and what lies there may have come with a target.
    del sys.path[0]

from pediag.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
