"""A plan as files and text for the things that start engines."""
