"""Run the dcpbench command with the faulty ranks of faulty.py, and an agent without torch."""

import dcpbench_fake

from dcpbench import cli
from dcpbench.commands import point_runner

if __name__ == "__main__":
    dcpbench_fake.install(setattr, quickly=True)
    point_runner.WORKER = "faulty"
    cli.main()
