"""What is left of a point: its record, the file, and what is computed of it."""
