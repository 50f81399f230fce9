"""The names that points are made of, for the command line and for the rooms that act on them. No torch."""

from __future__ import annotations

BACKENDS = ("reference", "triton", "flashinfer")
"""What --backend can be; kernels/attention makes them."""
EXCHANGES = ("ag_rs", "a2a")
"""What --exchange can be; exchange/ makes them."""
NO_EXCHANGE = "none"
"""What a point with dcp 1 has, where nothing is exchanged."""
