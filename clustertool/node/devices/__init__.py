"""Find, read and lock the devices of a node."""
