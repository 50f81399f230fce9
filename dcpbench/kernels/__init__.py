"""GPU operators, one file or folder each: functions named `reference` are slow and obvious, and the fast ones are
tested against them.

Letters of tensor suffixes: B requests, T tokens, H heads of one DCP group, h heads of one rank, N dcp, K local KV rows,
R latent, P rope, Q = R + P, D hidden, V value head, E experts.
"""
