"""The live view of a run: events in, screens out. It measures nothing and knows no torch."""
