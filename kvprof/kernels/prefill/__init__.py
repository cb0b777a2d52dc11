"""Causal attention of a prompt over compressed keys and values of unlike widths."""
