"""EDGE. The only importers of fabric and subprocess: connections, dispatch, carrying out steps, the local cluster."""
