"""Hold measurements of built-in machines: files of `dcpbench bench calibrate`, see points/cluster_specs.py."""
