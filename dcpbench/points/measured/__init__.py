"""Hold measurements of built-in machines: files of `dcpbench calibrate`, see points/machines.py."""
