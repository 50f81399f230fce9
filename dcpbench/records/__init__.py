"""Define the records of measured points: their fields, their file, and the values computed from them."""
