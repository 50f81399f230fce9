"""What `dcpbench` and `python -m dcpbench` start: the command line, also where Ctrl-C comes before it is imported."""

import sys


def main() -> None:
    """Entry point."""
    try:
        from dcpbench import cli
    except KeyboardInterrupt:
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
