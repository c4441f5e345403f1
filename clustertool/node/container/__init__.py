"""Containers of ranks on a node: their start, their first processes, their removal, and their images."""
