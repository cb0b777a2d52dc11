"""Attention of one new token per sequence over segments: quantised tokens and TALE's levels."""
