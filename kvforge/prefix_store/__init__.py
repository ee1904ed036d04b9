"""Pages of computed prefixes as files: what a file holds, whose it is, and a folder that servers share."""
