"""The program `jaxrl`, also as `python -m jaxrl`: it owns its signals before it imports more."""

import sys

from jaxrl.core import interrupts


def main() -> int:
    """Run the command line of this process and return the exit code."""
    interrupts.own()
    from jaxrl.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
