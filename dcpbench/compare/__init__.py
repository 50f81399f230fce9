"""Compare two runs with the verdicts FASTER, SLOWER, SAME or UNDECIDED, each with its uncertainty. No torch."""
