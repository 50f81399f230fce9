"""Run the dcpbench command with agents and ranks that start quickly."""

from dcpbench import cli
from dcpbench.commands import point_runner
from tests import as_fork

if __name__ == "__main__":
    as_fork.replace_agents(setattr)
    point_runner.WORKER = "tests.distributed.rank"
    cli.main()
