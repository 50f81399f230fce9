"""Benchmark parallel layouts for serving long-context models: tensor, decode-context and attention-data parallelism."""

__version__ = "0.1.0"
