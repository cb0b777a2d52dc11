"""Executes any plan inside transformers: cache, attention, folded projections."""
