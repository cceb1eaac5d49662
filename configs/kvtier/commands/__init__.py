"""One module a sub-command of `kvtier`, most with ``register(app)``; each imports what is heavy when it is called."""
