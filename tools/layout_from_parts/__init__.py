"""Forecast decode steps of vLLM on more GPUs than there are, put together from parts that were measured on one or two."""
