"""Ranks in containers: settings, command lines, and what nodes report of runtimes and images. Pure."""
