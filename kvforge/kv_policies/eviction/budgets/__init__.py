"""How KV heads share a budget: each file is a way to divide it, over whatever score a rule has."""
