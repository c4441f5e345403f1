"""This package runs a joining process in a pod: the first process of the pod, its log, and what it leaves behind."""
