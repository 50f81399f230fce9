"""Forecast decode steps of vLLM on more GPUs than the machine has, from parts that were measured on one or two GPUs."""
