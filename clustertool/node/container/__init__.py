"""This package starts and removes the containers of ranks on a node, and keeps their images."""
