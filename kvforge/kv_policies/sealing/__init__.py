"""The policy ``full`` on a cache of groups: whole pages are sealed in few bits, the newest page of a sequence stays
exact."""
