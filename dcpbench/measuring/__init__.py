"""Timing, profiling, and the state of the machine meanwhile."""
