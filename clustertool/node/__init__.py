"""What runs on the nodes: standard library only, Python >= 3.8, shipped as one content-addressed .pyz."""
