"""The requests that are open in the stub, by key and by the engine's ids."""

import threading

from kvforge.common.errors import RequestError
from kvforge.serving.stub.active import ActiveRequest


class OpenRequests:
    """Look-ups of single requests take no lock: a dictionary's own reads are atomic."""

    def __init__(self) -> None:
        self._by_key: dict[int, ActiveRequest] = {}
        self._by_engine_id: dict[str, ActiveRequest] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, active: ActiveRequest) -> None:
        """Raises RequestError when its key is in use."""
        with self._lock:
            if active.key in self._by_key:
                raise RequestError("is another request's: it is for the text models' own use", field="stream_key")
            self._by_key[active.key] = active
            self._by_engine_id.update(dict.fromkeys(active.engine_ids, active))

    def remove(self, active: ActiveRequest) -> bool:
        """False when it was not there any more."""
        with self._lock:
            for engine_id in active.engine_ids:
                self._by_engine_id.pop(engine_id, None)
            return self._by_key.pop(active.key, None) is not None

    def by_key(self, key: int) -> ActiveRequest | None:
        return self._by_key.get(key)

    def by_engine_id(self, engine_id: str) -> ActiveRequest | None:
        return self._by_engine_id.get(engine_id)

    def with_client_id(self, client_id: str) -> list[ActiveRequest]:
        """All requests that clients sent under this id, none for the empty one."""
        return [active for active in self.all() if client_id and active.client_id == client_id]

    def all(self) -> list[ActiveRequest]:
        with self._lock:
            return list(self._by_key.values())
