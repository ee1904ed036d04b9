"""From an engine's tokens to what a client gets."""
