"""How fast attention over a compressed cache is, against the best full-width kernel there is."""
