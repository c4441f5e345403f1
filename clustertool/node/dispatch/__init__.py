"""Receive pieces of a workspace and forward them to other nodes."""
