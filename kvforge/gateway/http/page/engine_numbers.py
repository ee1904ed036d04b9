"""The engine's numbers from Triton's metrics port, for `/metrics` and the page, whose browser may not ask there."""

import asyncio
import http.client
import re
import time

from kvforge.gateway.errors import ApiError
from kvforge.serving.health.probe import open_url

FAMILIES = re.compile("(# (HELP|TYPE) )?(kvforge_|nv_trt_llm_)")
"""Lines that begin so are passed on."""
TIMEOUT_S = 2.0
"""For the whole answer."""
HELD_S = 0.5
"""One answer, or the lack of one, serves everybody who asks within this time."""
MAX_BYTES = 4 << 20


class EngineNumbers:
    """`url` is Triton's metrics page. One call to it at a time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._asked = asyncio.Lock()
        self._read: tuple[float, str | None] = (-HELD_S, None)

    async def text(self) -> str:
        """Prometheus' text of the engine's families. Raises ApiError (503) where the server gives none."""
        async with self._asked:
            if time.monotonic() - self._read[0] >= HELD_S:
                try:
                    page = await asyncio.to_thread(self._ask)
                    found = "".join(f"{line}\n" for line in page.splitlines() if FAMILIES.match(line))
                except (OSError, http.client.HTTPException, ValueError):
                    found = None
                self._read = (time.monotonic(), found)
            found = self._read[1]
        if found is None:
            raise ApiError(503, "the server gives no metrics at the moment")
        return found

    def _ask(self) -> str:
        end = time.monotonic() + TIMEOUT_S
        page = b""
        with open_url(self._url, TIMEOUT_S) as response:
            while len(page) < MAX_BYTES and (more := response.read1(MAX_BYTES - len(page))):
                page += more
                if time.monotonic() > end:
                    raise TimeoutError
        return page.decode()
