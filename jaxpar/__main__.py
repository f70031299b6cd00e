"""`python -m jaxpar` is the `jaxpar` command."""

import sys

from jaxpar.cli import main

if __name__ == "__main__":
    sys.exit(main())
