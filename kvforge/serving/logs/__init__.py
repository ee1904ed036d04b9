"""Log lines of all of a server's processes, for people or machines."""
