"""This package describes ranks in containers: settings, command lines, what nodes report of runtimes and images. Pure."""
