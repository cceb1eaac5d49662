"""Prefix affinity for LiteLLM: every session goes to the vLLM replica where its prefix already lies.

A proxy configuration names `litellm_hooks.prefix_affinity.instance`. Importing this package imports nothing else.
"""
