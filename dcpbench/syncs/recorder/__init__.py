"""What `dcpbench syncs run` puts into every Python process of somebody's program, to record it with torch's profiler.

The folder stands first on PYTHONPATH, so that Python imports its sitecustomize.py at its start. The program may live in
another environment: these files use the standard library and the program's own torch, never dcpbench.
"""
