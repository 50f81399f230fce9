"""The dcpbench command with ranks that begin at once."""

from dcpbench import cli
from tests import rank_fork

if __name__ == "__main__":
    rank_fork.install(setattr)
    cli.main()
