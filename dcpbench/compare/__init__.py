"""Compares two runs and says FASTER, SLOWER, SAME or UNDECIDED, each with how well it is known. No torch."""
