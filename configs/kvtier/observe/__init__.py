"""A running engine seen from outside: its /metrics as one struct, and the changes between two looks."""
