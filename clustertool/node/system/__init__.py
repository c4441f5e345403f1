"""Wrap what the operating system offers: processes, mounts, users, TLS."""
