"""Run torchrun's agent as the parent process that its ranks are tied to, instead of the process that started it."""

import os
import runpy

from dcpbench.launch import subprocess_guard

if __name__ == "__main__":
    os.environ[subprocess_guard.PARENT] = str(os.getpid())
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
