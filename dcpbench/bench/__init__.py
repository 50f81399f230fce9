"""Benches of single operators."""
