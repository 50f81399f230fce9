"""torchrun's agent, as what it is to its ranks: the process that they are tied to, and not the one that was asked for it."""

import os
import runpy

from dcpbench.launch import child

if __name__ == "__main__":
    os.environ[child.PARENT] = str(os.getpid())
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
