"""Measuring an engine on workloads of random tokens."""
