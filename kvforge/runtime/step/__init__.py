"""One planned step on a session: its inputs, ``lower``, ``upper``, and what may be drafted or left out on the way."""
