"""One module per sub-command: ``add_parser`` declares it, ``run`` does it; heavy imports stay inside ``run``."""
