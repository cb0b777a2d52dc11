"""The version, kept apart so that the build can read it without importing kvprof."""

__version__ = "0.1.0"
