"""Describe a workspace and how it spreads: manifest, portions of data, topology."""
