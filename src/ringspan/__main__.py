"""`python -m ringspan` is the `ringspan` command."""

import sys

from ringspan.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
