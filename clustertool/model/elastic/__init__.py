"""The rules of elastic jobs: leases of nodes, numbers of epochs, and when the next epoch may start."""
