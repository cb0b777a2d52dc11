"""Compressed caches in vLLM: the plug-in, the load that a server is put under, its simulator.

The engine is vLLM's own; kvprof brings the attention back end, the plan, the load and what is
measured.
"""
