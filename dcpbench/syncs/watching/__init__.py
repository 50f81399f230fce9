"""What the live detector listens to, and what it makes of it."""
