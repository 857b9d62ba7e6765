"""What KEDA speaks with an external scaler: `externalscaler.proto`, and what `shoal generate` makes of it."""
