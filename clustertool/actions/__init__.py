"""Actions do what verbs and the Python API need of a cluster: read the configuration, start, find, follow and stop jobs."""
