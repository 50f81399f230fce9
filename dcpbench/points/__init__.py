"""Define what is measured: points with their loads and settings, layouts, and their memory cost."""
