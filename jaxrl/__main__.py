"""Entry point of the commands `jaxrl` and `python -m jaxrl`, which installs signal handlers before other imports."""

import sys

from jaxrl.core import interrupts


def main() -> int:
    """Run the command line of this process and return the exit code."""
    interrupts.own()
    from jaxrl.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
