"""One module a sub-command of `kvtier`, most with ``register(app)``; each imports what is heavy only when it is called."""
