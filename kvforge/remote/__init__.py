"""Servers of OpenAI's HTTP API, as a client sees them."""
