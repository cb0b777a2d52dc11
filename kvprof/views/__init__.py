"""Pure functions from a result to a Rich renderable, a plot, CSV, SVG or PNG."""
