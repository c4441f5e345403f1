"""Run the embedded local cluster: OpenSSH servers on loopback."""
