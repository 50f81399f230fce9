"""What a report says about points that served requests; live runs and replays are kept apart throughout."""
