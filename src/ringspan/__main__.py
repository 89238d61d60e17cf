"""`python -m ringspan` is the `ringspan` command."""

import sys


def main() -> None:
    """The command line; an interrupt while it is imported ends like one afterwards."""
    try:
        from ringspan.cli.main import main as run
    except KeyboardInterrupt:
        print("ringspan: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
