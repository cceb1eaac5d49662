"""One module a sub-command of `kvtier`; each imports what is heavy only when it is called."""
