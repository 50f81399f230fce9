"""GPU operators, one file or folder each: what is called `reference` is slow and obvious, the fast is tested against it.

Letters of tensor suffixes: B requests, T tokens, H heads of one DCP group, h heads of one rank, N dcp, K local KV rows,
R latent, P rope, Q = R + P, D hidden, V value head, E experts.
"""
