"""Attention of a new token over latents from before RoPE, keys rebuilt; and pages of such keys."""
