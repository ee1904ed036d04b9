"""Loaded engines, one session per target: graphs, weights, pools, and what the graphs take of a step."""
