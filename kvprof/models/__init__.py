"""Loading any Hugging Face decoder, seeing how it is built, and tapping its Q, K and V."""
