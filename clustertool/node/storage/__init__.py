"""Keep files, pieces and releases safely on a node."""
