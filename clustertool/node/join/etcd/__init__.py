"""Keep the epochs of an elastic job in etcd, so that the coordinator's node may be lost."""
