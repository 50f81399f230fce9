"""Serving without a GPU: requests, KV pages, the prefix cache and the scheduler, on host-side integers. No torch.

The engine executes the decisions of the scheduler; replay runs the same scheduler in virtual time.
"""
