"""`python -m ringspan` is the `ringspan` command."""

import sys


def main() -> None:
    """Run the command line; an interrupt during its import ends like a later one."""
    try:
        from ringspan.cli.main import main as run
    except KeyboardInterrupt:
        print("ringspan: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
