"""Neighbours of an attack: streams that run while one client asks for something costly, and the longest time that any
of them waited for its next token."""
