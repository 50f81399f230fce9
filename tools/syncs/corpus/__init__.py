"""Provide small programs with known numbers of synchronisations, with which every detector is measured."""
