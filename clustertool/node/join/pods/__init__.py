"""A joining process in a pod of Kubernetes: the first process of the pod, its log, and what it leaves behind."""
