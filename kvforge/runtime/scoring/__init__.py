"""Log-probabilities of given tokens."""
