"""`python -m jaxrl`: the command line, where no script is on the path."""

import sys

from jaxrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
