"""This package runs on the nodes: standard library only, Python >= 3.8, sent as a package that is named by its digest."""
