"""The commands of ``kvtier``, one module each, every one with ``register(app)``."""
