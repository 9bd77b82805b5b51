"""``python -m pediag``, and the ``pediag`` script."""

from __future__ import annotations

import os
import sys

HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def run() -> None:
    """Run the command line and exit with its status; an interrupt counts from the first import on."""
    try:
        from pediag.cli import main

        status = main()
    except KeyboardInterrupt:
        print("pediag: interrupted", file=sys.stderr)
        status = 130
    sys.exit(status)


if __name__ == "__main__":
    # Python puts the current folder first on the path, and what lies there may have come with a target.
    if not getattr(sys.flags, "safe_path", False) and sys.path[0] != HOME:
        del sys.path[0]
    run()
