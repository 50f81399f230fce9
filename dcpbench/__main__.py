"""Start the command line for `dcpbench` and `python -m dcpbench`. Ctrl-C during its import also ends with code 130."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from dcpbench import cli
    except KeyboardInterrupt:
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
