"""Workloads of a built engine: `decode` and `serve` measure, `verify` compares."""
