"""What parent and worker say to each other over two pipes: a header, then bytes.

parent: setup (the payload is SETUP), then jobs      worker: READY or FAILED, then DONE for each job; LAST
or FAILED where the worker takes no more
"""

import struct

JOB = struct.Struct("<ddQ")
"""Wall seconds, processor seconds (0: no limit), length of the payload."""
ANSWER = struct.Struct("<BQ")
"""DONE, LAST, READY or FAILED, length of the payload."""
SETUP = struct.Struct("<Q")
"""Bytes of memory that the worker may take beyond what it has when it is ready."""
DONE, LAST, READY, FAILED = 0, 1, 2, 3
