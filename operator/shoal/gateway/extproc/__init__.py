"""Envoy's external processing: an Envoy carries the requests, and this gateway decides on each of them."""
