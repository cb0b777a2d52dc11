"""Compressed caches in vLLM: the plug-in, the load generator and a simulator of the scheduler."""
