"""What a bench found, as tables, pictures and sentences."""
