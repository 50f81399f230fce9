"""GPU operators, one folder each: `reference.py` is slow and obvious, the other files are fast and tested against it.

Letters of tensor suffixes: B requests, T tokens, H heads of one DCP group, h heads of one rank, N dcp, K local KV rows,
R latent, P rope, Q = R + P, D hidden, V value head, E experts.
"""
