"""Judge the facts of nodes: each node alone, nodes among each other, devices, links, the framework trial."""
