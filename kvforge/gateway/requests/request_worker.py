"""`python -m kvforge.gateway.requests.request_worker DIGEST OPTIONS`: reads bodies for a gateway of these options."""

import sys

from kvforge.workers import serve


def _prepare():
    from kvforge.common.errors import KvforgeError
    from kvforge.common.records import from_text
    from kvforge.gateway.endpoints import Endpoint
    from kvforge.gateway.errors import ApiError
    from kvforge.gateway.model import ServedModel
    from kvforge.gateway.options import GatewayOptions
    from kvforge.gateway.parsed_request import pack
    from kvforge.gateway.requests.request_reader import RequestReader

    options = from_text(GatewayOptions, sys.argv[2])
    model = ServedModel.load(options)
    if model.digest != sys.argv[1]:
        raise KvforgeError("the engine's tokenizer is not the one that the gateway was started with; restart it")
    reader = RequestReader(model, options)

    def handle(job: bytes) -> bytes:
        try:
            return pack(reader.read(job[1:], Endpoint(int(job[:1]))))
        except ApiError as error:
            return pack(error)

    return handle


if __name__ == "__main__":
    serve(_prepare)
