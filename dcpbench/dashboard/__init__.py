"""A static site over many runs: each point's history with change points, a page per run, a server of one's own.

No torch; what is heavy is imported inside functions.
"""
