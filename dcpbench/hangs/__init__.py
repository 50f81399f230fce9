"""Hangs: where each rank of a job is, in files that outlive it, and who kept the others waiting. No torch."""
