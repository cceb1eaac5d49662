"""The door of LMCache's multi-process server: its L2 plugin, what proves a model to it, and a distributed store behind.

``adapter`` is the plugin; ``engine_mark`` is what vLLM's process adds to the keys so that the server, which knows no
weights, cannot mix two models up.
"""
