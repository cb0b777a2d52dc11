"""Run a token's operations between products in one launch, rounding where the model does."""
