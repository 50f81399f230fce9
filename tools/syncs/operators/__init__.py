"""Measure which of torch's operators make the host wait for the GPU."""
