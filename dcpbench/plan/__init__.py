"""Convert options to points, and validate them before anything runs."""
