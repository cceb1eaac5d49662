"""Would it work, and does it: checks as data, each with the command that mends it."""
