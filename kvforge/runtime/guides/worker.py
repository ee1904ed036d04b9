"""The worker process: `python -m kvforge.runtime.guides.worker TOKENIZER_DIR [EOS_ID ...]`."""

import json
import sys
from pathlib import Path
from typing import Any

from kvforge.common.errors import RequestError
from kvforge.common.refusals import Refusal
from kvforge.runtime.guides.verdict import Verdict
from kvforge.runtime.requests.guided_decoding import NEEDS_LLGUIDANCE, GuidedDecoding
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.workers import serve


def _prepare() -> Any:
    tokenizer = Tokenizer.from_dir(Path(sys.argv[1]))
    assert tokenizer is not None
    added = tokenizer.backend.get_added_tokens_decoder()
    special = {token.content for token in added.values() if token.special}
    try:
        from kvforge.runtime.guides.judgement import judged
        from kvforge.runtime.guides.matchers import make_vocabulary

        vocabulary = make_vocabulary(tokenizer, [int(token) for token in sys.argv[2:]])
        no_text = {token.content for index, token in added.items() if vocabulary.is_special_token(index)}
    except ImportError:
        return _refuse(NEEDS_LLGUIDANCE)
    except RequestError as error:
        return _refuse(error.refusal)

    def handle(request: bytes) -> bytes:
        guided = GuidedDecoding(**json.loads(request))
        return json.dumps(judged(guided, vocabulary, special.__contains__, no_text).to_json()).encode()

    return handle


def _refuse(refusal: Refusal) -> Any:
    answer = json.dumps(Verdict(refusal=refusal).to_json()).encode()
    return lambda request: answer


if __name__ == "__main__":
    serve(_prepare)
