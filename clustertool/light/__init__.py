"""Light modules stand in on nodes for those of the standard library that take long to import, with no more than is used there.

Whatever one of them lacks it takes from the module it stands for.
fleet/node_bundle.py puts them in where the node's code is shipped.
"""
