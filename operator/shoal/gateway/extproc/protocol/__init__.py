"""What Envoy speaks with this gateway: `external_processor.proto`, and what `shoal generate` makes of it."""
