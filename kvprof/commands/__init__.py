"""One module per subcommand: read options, call, show. No mathematics, no torch at import."""
