"""Build a static site over many runs: each point's history with change points, a page per run, and a local server.

No torch; heavy modules are imported inside functions.
"""
