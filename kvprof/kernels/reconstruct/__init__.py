"""Attention of one new token per sequence over latents from before RoPE: keys are rebuilt."""
