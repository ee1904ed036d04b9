"""Programs that run public agents, each under an interpreter that has its packages: ``python PROGRAM URL MODE``.

A task has three steps, each a call of a tool, and ends with an answer. In mode ``auto`` the model decides what it
calls; in mode ``forced`` the agent asks for a call three times and then for none, so that a guide writes the calls.
Each prints one line of JSON: the calls that its tools ran, the last answer, and the versions of its packages.
"""
