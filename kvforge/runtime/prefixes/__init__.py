"""A second tier of the prefix cache: pages go to files behind the steps, and are read ahead of them."""
