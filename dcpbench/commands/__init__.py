"""One file a command: its options, and what it does."""
