"""Define what is measured: points with their loads and settings, model shapes, layouts, and their memory cost."""
