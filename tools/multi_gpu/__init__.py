"""Run the prepared measurements on two, four or eight GPUs."""
