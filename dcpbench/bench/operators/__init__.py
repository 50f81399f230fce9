"""What each bench runs on its ranks."""
