"""Whether a server would serve: asked of Triton, answered to probes, tried by a canary."""
