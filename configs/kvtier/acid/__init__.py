"""The acid test: does a tier really serve? Asked of any running vLLM, answered from the engine's own metrics."""
