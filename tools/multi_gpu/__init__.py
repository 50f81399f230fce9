"""The prepared run of two, four or eight GPUs."""
