"""A real engine under many sessions while its cache directory is damaged, filled, and made read-only and back."""
