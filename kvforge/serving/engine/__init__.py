"""The engine in a process of its own, and what the stub and it say to each other."""
