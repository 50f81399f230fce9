"""Results of a bench as tables, pictures and sentences."""
