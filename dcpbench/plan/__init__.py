"""Options become points, judged before anything runs."""
