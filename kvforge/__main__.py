"""``python -m kvforge`` is the ``kvforge`` command."""

import sys

from kvforge.cli import main

sys.exit(main())
