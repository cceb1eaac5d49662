"""A live view of one or more engines."""
