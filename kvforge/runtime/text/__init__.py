"""Text to tokens and back, piece by piece, and where it ends."""
