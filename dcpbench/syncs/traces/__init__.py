"""Reads a profiler's trace and finds what blocked the host in it, and what that cost."""
