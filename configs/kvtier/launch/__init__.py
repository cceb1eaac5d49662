"""Start vLLM from a plan: arguments merged, leaked maps swept, log followed, signals passed on."""
