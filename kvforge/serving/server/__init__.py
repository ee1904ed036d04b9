"""Starting, supervising and ending a Triton server for one engine."""
