"""FDC's online compression: RoPE, a head's basis, the store into the packed cache; one pass."""
