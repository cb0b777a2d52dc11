"""Recipes: a paper's table as a file, the cells that answer it, and whether it holds here.

Recipe file → resolved cells → results, each kept → measures → verdicts → ledger.
"""
