"""Attention of a new token over quantised segments and TALE's levels; storing and reading them."""
