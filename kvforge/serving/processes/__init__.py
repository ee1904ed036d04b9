"""What a server's processes know of each other, and what they leave behind."""
