"""Copy a workspace to all nodes."""
