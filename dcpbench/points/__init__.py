"""What is asked: points with their loads and settings, model shapes, layouts, and what they cost in memory."""
