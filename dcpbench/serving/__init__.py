"""Serving without a GPU: requests, KV pages, the prefix cache and the scheduler, on host-side integers. No torch.

The engine runs what the scheduler decides; replay runs the same scheduler in virtual time.
"""
