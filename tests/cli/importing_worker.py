"""A worker that never comes to an end of its imports."""

import time

time.sleep(600)
