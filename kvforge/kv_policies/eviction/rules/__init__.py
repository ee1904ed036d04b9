"""The rules, each in the file of its name."""
