"""Pure mathematics on tensors: moments, bases, spectra, ranks, stability."""
