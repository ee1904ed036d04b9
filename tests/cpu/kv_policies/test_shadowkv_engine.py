"""LLMEngine with ShadowKV against the brute-force reference of the whole model, on random small models."""

import json
import random

import numpy as np
import pytest
import torch

from kvforge.compiler import BuildOptions
from kvforge.kv_policies.shadowkv import ShadowKV
from kvforge.runtime import LLMEngine, SamplingParams
from model_defs import load_config
from model_defs.reference import reference_logits
from tests.support.models.checkpoints import load_weights, make_checkpoint
from tests.support.operators.shadowkv_reference import Parameters, ShadowModel
from tests.support.rounding import assert_near, model_error, relative_error
from tests.support.sessions.eager import eager_session

MODELS = (
    ("llama", 2, 2, {"num_hidden_layers": 5}),
    ("llama", None, 1, {"num_hidden_layers": 2, "num_key_value_heads": 4}),  # MHA
    ("qwen2", 1, 3, {"num_hidden_layers": 4, "num_key_value_heads": 1}),  # MQA, biases
    ("qwen3", 2, 1, {"num_hidden_layers": 4, "head_dim": 24}),
)


class Case:
    """A random checkpoint with random parameters of the policy, as an engine and as the reference."""

    def __init__(self, folder, seed):
        self.rng = random.Random(seed)
        family, cut, group_size, overrides = MODELS[seed % len(MODELS)]
        checkpoint = make_checkpoint(folder, family, cut=cut, group_size=group_size, seed=seed, **overrides)
        self.config = load_config(json.loads((checkpoint / "config.json").read_text()))
        self.weights = load_weights(checkpoint)
        chunk = self.rng.choice([4, 8])
        self.policy = ShadowKV(
            rank=self.rng.choice([self.config.kv_dim, self.config.kv_dim * 3 // 4]),
            chunk_size=chunk,
            sparse_budget=chunk * self.rng.randint(2, 6),
            num_outlier_chunks=self.rng.choice([0, 1, 3]),
            num_local_tokens=self.rng.choice([8, 32]),
        )
        limits = {"max_num_seqs": 6, "max_num_tokens": self.rng.choice([24, 64, 256]), "max_seq_len": 512}
        options = BuildOptions(dtype="float32", page_size=16, kv_policy=str(self.policy), **limits)
        self.session = eager_session(checkpoint, options)
        parameters = Parameters(*(self.policy.parameters[name] for name in Parameters.__dataclass_fields__))
        self.reference = ShadowModel(self.config, self.weights, parameters)

    @property
    def least(self):
        """The shortest prompt that is factored."""
        chunks = self.policy.num_outlier_chunks + self.policy.max_selected + 1
        return chunks * self.policy.chunk_size + self.policy.num_local_tokens

    def rounding(self, tokens):
        """Of the largest logit: fp32 engine, fp64 reference. Each layer's keys are products with an orthonormal basis
        of fp32 and its transpose."""
        return model_error(self.config, tokens, *self.config.num_layers * (self.policy.rank, self.config.kv_dim))

    def prompt(self, length):
        return [self.rng.randrange(3, self.config.vocab_size) for _ in range(length)]

    def generate(self, prompts, num_tokens, **engine_options):
        """Greedy tokens and their logits for every prompt, served together."""
        engine = LLMEngine(session=self.session, **engine_options)
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, return_logits=True)
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, params)
        tokens, logits = [[] for _ in prompts], [[] for _ in prompts]
        while engine.has_unfinished():
            for output in engine.step():
                assert output.finish_reason in (None, "length"), output.stop_reason
                tokens[int(output.request_id)] += output.new_token_ids
                logits[int(output.request_id)] += output.logits
        self.num_preemptions = engine.scheduler.num_preemptions
        return tokens, [torch.from_numpy(np.stack(rows)) for rows in logits]

    def check(self, prompts, num_tokens, **engine_options):
        tokens, logits = self.generate(prompts, num_tokens, **engine_options)
        for prompt, generated, got in zip(prompts, tokens, logits, strict=True):
            want = self.reference.logits(prompt, generated[:-1]).float()
            assert len(got) == num_tokens
            assert_near(got, want, self.rounding(len(prompt) + num_tokens))


@pytest.mark.with_full(seed=range(4, 20))
@pytest.mark.parametrize("seed", range(20))
def test_mixed_prompts(tmp_path, seed):
    """Prompts just at and just above what is factored and long ones, in one batch; a shared prefix; chunked prefill.
    120 sequences with --full, else 24."""
    case = Case(tmp_path, seed)
    prompts = [case.prompt(n) for n in (case.least - 1, case.least, case.least + 5, case.rng.randint(150, 250), 3)]
    prompts.append(prompts[3][:-20] + case.prompt(9))
    case.check(prompts, num_tokens=6)


@pytest.mark.with_full(seed=[20, 23])
@pytest.mark.parametrize("seed", [21, 20, 23])
def test_long_generation(tmp_path, seed):
    """More than 200 tokens, each of which stays exact and attended."""
    case = Case(tmp_path, seed)
    case.check([case.prompt(case.least + 40), case.prompt(case.least)], num_tokens=210)


def test_preemption(tmp_path):
    """Fewer pages than the batch comes to need: sequences lose everything and come back as they were."""
    case = Case(tmp_path, 30)
    prompts = [case.prompt(case.least + 8 * n) for n in range(3)]
    case.check(prompts, num_tokens=60, num_pages=3 * -(-case.least // 16) - 2, enable_prefix_cache=False)
    assert case.num_preemptions > 0


def test_all_but_one_chunk_at_full_rank(tmp_path):
    """Budget and outliers are one chunk short of the prompt: close to exact attention, and exact one chunk before."""
    case = Case(tmp_path, 40)
    below, above = case.prompt(case.least - 1), case.prompt(case.least)
    tokens, logits = case.generate([below, above], 4)
    for prompt, generated, got in zip((below, above), tokens, logits, strict=True):
        want = reference_logits(case.config, case.weights, torch.tensor(prompt + generated))[len(prompt) - 1 : -1]
        difference, rounding = relative_error(got, want), case.rounding(len(prompt) + 4)
        assert difference < rounding if prompt is below else rounding < difference < 0.2
