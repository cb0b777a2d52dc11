"""Requests that arrive while others are served: arrivals, lengths, the sweep over rates."""
