"""What ``kvforge doctor`` checks; nothing of it changes anything."""
