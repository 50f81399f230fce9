"""Provide small programs with a known number of synchronisations each, against which every detector is measured."""
