"""Read a profiler's trace and find what blocked the host in it, and the cost."""
