"""The HTTP server: connections, routes, limits, errors, the page."""
