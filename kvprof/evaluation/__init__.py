"""What a plan costs in accuracy: prefill, decode through the compressed cache, compare."""
