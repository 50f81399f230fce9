"""Torchrun jobs, their files, folders and progress."""
