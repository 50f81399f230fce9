"""Hang during an import, in place of the worker."""

import time

time.sleep(600)
