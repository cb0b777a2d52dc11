"""Attention of one new token per sequence over quantised storage and over levels of tokens."""
