"""Shoal: a Kubernetes operator and control plane for GPU inference fleets."""
