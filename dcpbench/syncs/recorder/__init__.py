"""Hold the files that `dcpbench syncs run` loads in every Python process of a program, to record it with torch's
profiler.

The folder is first on PYTHONPATH, so that Python imports its sitecustomize.py at its start. The program may use another
environment: these files use the standard library and the program's own torch, never dcpbench.
"""
