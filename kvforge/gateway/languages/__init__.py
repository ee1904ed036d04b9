"""How models write calls of tools and their reasoning: how to read, render and guide them."""
