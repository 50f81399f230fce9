"""Worker with an import that never ends."""

import time

time.sleep(600)
