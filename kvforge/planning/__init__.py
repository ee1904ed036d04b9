"""What a model costs: FLOPs and cache bytes per token, capacity of a memory, bounds on what a cut can gain."""
