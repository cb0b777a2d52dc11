"""Attention of one new token per sequence over a compressed cache."""
