"""What every other part may use: errors, formats of numbers, facts of the machine, whole output directories."""
