"""What was measured of machines that are built in: files of `dcpbench calibrate`, see points/machines.py."""
