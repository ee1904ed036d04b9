"""An engine as a model of lm-evaluation-harness, ``--model kvforge --model_args engine=DIR``.

``python -m kvforge.evaluation.lm_harness run --model kvforge …`` is lm-evaluation-harness's own command with this
model registered.
"""

import hashlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from kvforge.common.checkpoint_files import tokenizer_files
from kvforge.common.errors import EngineError, KvforgeError
from kvforge.common.sampling_fields import DEFAULT_FIELDS
from kvforge.evaluation.engine import check_finished
from kvforge.manifest import TOKENIZER_DIR
from kvforge.runtime import LLM, SamplingParams
from kvforge.runtime.requests.checks import longer_sequences
from kvforge.runtime.scoring.score import score
from kvforge.tokenization.chat_template import ChatTemplate
from kvforge.tokenization.files import read_tokenizer_config, special_tokens, tokens_before_text

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

log = logging.getLogger(__name__)

Pair = tuple[tuple[str, str] | None, list[int], list[int]]
"""Key in lm-evaluation-harness's cache, token ids of the context, token ids of the continuation."""


@register_model("kvforge")
class EngineLM(TemplateLM):
    """An engine directory's model.

    Texts too long for the engine lose their beginning, as lm-evaluation-harness prescribes; the log says how many did.
    ``batch_size`` and ``device`` are accepted and without effect: the engine batches what fits its steps.
    """

    def __init__(
        self,
        engine: str | Path | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        kv_cache_gib: float | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        show_progress: bool | None = None,
    ) -> None:
        """Load ``engine``. ``max_length`` lowers its ``max_seq_len``; ``max_gen_toks`` is for tasks that do not say,
        and at most half of that; ``show_progress`` draws bars (None: on a terminal).

        Raises:
            KvforgeError: the engine cannot be loaded, has no tokenizer, or a value is out of range.
        """
        super().__init__()
        if engine is None:
            raise KvforgeError("--model kvforge needs an engine; give --model_args engine=DIR.")
        if max_gen_toks < 1:
            raise KvforgeError(f"max_gen_toks is {max_gen_toks}; give 1 or more.")
        self.llm = LLM(Path(engine), kv_cache_gib=kv_cache_gib, max_seq_len=max_length)
        if self.llm.tokenizer is None:
            raise EngineError(f"{engine} has no tokenizer; rebuild it from a checkpoint that has one.")
        self.tokens = self.llm.tokenizer
        self.max_length = self.llm.engine.config.max_seq_len
        self.max_gen_toks = max(min(max_gen_toks, self.max_length // 2), 1)
        self.batch_size = batch_size
        self.quiet = not (sys.stderr.isatty() if show_progress is None else show_progress)
        folder = Path(engine) / TOKENIZER_DIR
        self.template = ChatTemplate.from_dir(folder)
        names = special_tokens(read_tokenizer_config(folder))
        self._lead, bos = tokens_before_text(self.tokens.backend), names.get("bos_token")
        bos_id = None if bos is None else self.tokens.backend.token_to_id(bos)
        if bos_id is None and not self.llm.engine.manifest.eos_token_ids:
            raise EngineError(f"{engine} names no token that begins or ends a text; rebuild it with an eos_token_id.")
        self._prefix = self.eot_token_id if bos_id is None else bos_id
        content = b"\0".join((folder / name).read_bytes() for name in tokenizer_files(folder))
        self._tokenizer_name = f"kvforge-{hashlib.sha256(content).hexdigest()[:16]}"

    @property
    def eot_token_id(self) -> int:
        """The first of the engine's end-of-text tokens."""
        return self.llm.engine.manifest.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: the beginning-of-text token, or the end-of-text token."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """A name that is equal for equal tokenizers and chat templates."""
        return self._tokenizer_name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the engine's chat template, None where none is asked for; conversations without tools
        are written by the default one."""
        if chat_template is False or chat_template is None:
            return None
        template = self._template()
        name = template.name_for(None)
        if isinstance(chat_template, str) and chat_template != name:
            raise KvforgeError(f"tasks are not written by the chat template {chat_template!r}; leave the name out.")
        return template.sources[name]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text, up to where the assistant's next turn begins, or without
        ``add_generation_prompt`` up to the end of the last message's content, so that it can be continued."""
        if add_generation_prompt or not chat_history:
            return self._template().render(chat_history, add_generation_prompt=add_generation_prompt)
        return self._template().render_open(chat_history)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text, after what the tokenizer puts before a text unless the text begins with it already or
        ``add_special_tokens`` is False; never an end-of-text token after it."""
        ids = self.tokens.encode(string, add_special_tokens=False)
        if add_special_tokens is None:
            add_special_tokens = ids[: len(self._lead)] != self._lead
        return [*self._lead, *ids] if add_special_tokens else ids

    def loglikelihood(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Log-likelihoods of continuations given contexts, and whether each is the greedy one."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.quiet)

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs, num_cut = [], 0
        for key, context, continuation in requests:
            if key is not None and not continuation:
                raise KvforgeError(
                    f"the tokenizer leaves the answer {key[1]!r} no token of its own after its context, so it cannot "
                    "be scored; the task needs a space between them."
                )
            room = self.max_length - len(continuation)
            if room < 1:
                raise KvforgeError(
                    f"a continuation of {len(continuation)} tokens leaves no context within the engine's "
                    f"{self.max_length}; {longer_sequences(self.max_length)}."
                )
            num_cut += len(context) > room
            pairs.append((context[-room:] or [self.prefix_token_id], continuation))
        self._warn(num_cut, len(pairs), "contexts")
        results = []
        for (key, _, _), scored in zip(requests, score(self.llm, pairs, use_tqdm=not disable_tqdm), strict=True):
            results.append((float(scored.logprobs.double().sum()), bool(scored.is_top.all())))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, results[-1])
        return results

    def loglikelihood_rolling(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, given the prefix token. A text longer than the engine's limit is scored in
        windows, each token once, and in the last window with as much context as there is room for."""
        windows: list[Pair] = []
        counts = []
        for (text,) in (request.args for request in requests):
            pieces = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            found = [(None, *make_disjoint_window(piece)) for piece in pieces]
            windows += found
            counts.append(len(found))
        scored = iter(self._loglikelihood_tokens(windows, disable_tqdm or self.quiet))
        results = [sum(next(scored)[0] for _ in range(count)) for count in counts]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return results

    def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[str]:
        """Generated texts up to the first stop string.

        Raises:
            KvforgeError: a task asks for an option of sampling that the engine does not have, or a request fails.
        """
        prompts, params, num_cut = [], [], 0
        for context, gen_kwargs in (request.args for request in requests):
            sampling = self._sampling(gen_kwargs)
            ids = self.tok_encode(context)
            room = self.max_length - sampling.max_tokens
            num_cut += len(ids) > room
            prompts.append(ids[-room:])
            params.append(sampling)
        self._warn(num_cut, len(prompts), "prompts")
        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="Generating", disable=disable_tqdm or self.quiet) as bar:
            for position, output in self._generated(prompts, params):
                texts[position] = output
                self.cache_hook.add_partial("generate_until", requests[position].args, output)
                bar.update()
        return texts

    def _generated(self, prompts: list[list[int]], params: list[SamplingParams]) -> Iterator[tuple[int, str]]:
        for position, result in self.llm.run(prompts, params, stream=False):
            check_finished(result.outputs)
            yield position, result.outputs[0].text

    def _sampling(self, gen_kwargs: dict[str, Any]) -> SamplingParams:
        options = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        until = [text for text in options.pop("until") if text]
        max_tokens = options.pop("max_gen_toks")
        if not 1 <= max_tokens < self.max_length:
            raise KvforgeError(
                f"the task generates {max_tokens} tokens and the engine takes {self.max_length}, prompt included; set "
                f"another max_gen_toks in the task, or {longer_sequences(self.max_length)}."
            )
        if not options.pop("do_sample"):
            options["temperature"] = 0.0
        known = {*DEFAULT_FIELDS, "seed"}
        if unknown := sorted(set(options) - known):
            raise KvforgeError(
                f"the task sets {unknown[0]} for generation, which the engine does not have; remove it from the task."
            )
        # The engine's text leaves special tokens out, so those that end an answer are looked for by their ids.
        added = self.tokens.backend.get_added_tokens_decoder()
        special = {token.content: index for index, token in added.items() if token.special}
        return SamplingParams(
            max_tokens=max_tokens,
            stop=[text for text in until if text not in special],
            stop_token_ids=[special[text] for text in until if text in special],
            **options,
        )

    def _template(self) -> ChatTemplate:
        if self.template is None:
            raise KvforgeError(
                "this engine has no chat template; build it from a checkpoint with chat_template.jinja, or choose "
                "tasks without one."
            )
        return self.template

    def _warn(self, num_cut: int, total: int, what: str) -> None:
        if num_cut:
            limit = self.max_length
            log.warning("%d of %d %s exceed %d tokens and lost their beginning", num_cut, total, what, limit)


def main() -> int:
    """Run lm-evaluation-harness's command with the model ``kvforge``; a KvforgeError is one line and gives 1."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except KvforgeError as error:
        print(f"kvforge: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
