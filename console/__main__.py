"""``glowplug``: opens the console, or does one verb's work without a screen."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    from console.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
