"""Shoal's contracts: the custom resources, the names on child objects, the messages between processes. No I/O."""
