"""How fast attention over a compressed cache is, against the fastest uncompressed kernel."""
