"""Finds hidden CUDA synchronisation: in traces, live, and without a GPU."""
