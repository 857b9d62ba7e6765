"""How Shoal's processes reach each other: certificates and TLS."""
