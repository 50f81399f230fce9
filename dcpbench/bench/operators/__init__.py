"""Operators that each bench runs on its ranks."""
