"""A cut of models with linear attention: states above it are made of the single input, and read by survivors alone."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvforge.checkpoint.model import check_weights, open_model, read_model_config
from kvforge.common.errors import BuildError, KvforgeError, RequestError
from kvforge.compiler.export import export_lower, export_upper
from kvforge.compiler.graph_checks import verify
from kvforge.compiler.options import BuildOptions, resolve
from kvforge.costs.cache import state_bytes
from kvforge.costs.flops import full_token, skipped_token
from kvforge.costs.weights import step_weights
from kvforge.rewire import RewireOptions, rewire_checkpoint
from kvforge.runtime import LLM, LLMEngine, SamplingParams, SpeculativeConfig
from kvforge.runtime.scoring.score import score
from kvforge.runtime.speculation.drafting import Drafting
from model_defs import ModelError, load_config
from model_defs.reference import reference_logits
from model_defs.weights import is_teacher_only, weight_specs
from tests.support.models.checkpoints import MAMBA, SMALL, load_weights, make_checkpoint
from tests.support.rounding import assert_near, config_of, model_error, roundings_error
from tests.support.schedules.drafters import AdversarialDrafter
from tests.support.schedules.step_driver import StepDriver
from tests.support.sessions.eager import eager_session

NEXT, DENSE, MOE = "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"
LFM, GRANITE, BAMBA, KIMI = "lfm2", "granitemoehybrid", "bamba", "kimi_linear"
OPTIONS = BuildOptions(page_size=8, max_num_tokens=128, max_draft_len=3)
LINEAR, FULL = "linear_attention", "full_attention"
CUTS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "linear layers alone above it": (NEXT, 1, 1, {"layer_types": [FULL, LINEAR, LINEAR]}),
    "attention alone above it": (DENSE, 2, 2, {"layer_types": [LINEAR, LINEAR, FULL, FULL]}),
    "no sharing": (MOE, 3, 1, {"num_hidden_layers": 6, "full_attention_interval": 2}),
    "groups of two, the last one smaller": (DENSE, 1, 2, {"num_hidden_layers": 7, "full_attention_interval": 2}),
    "a long convolution": (NEXT, 2, 1, {"num_hidden_layers": 5, "linear_conv_kernel_dim": 6}),
    "gated convolutions": (LFM, 2, 1, {"num_hidden_layers": 6, "full_attn_idxs": [1, 4]}),
    "longer ones alone above it": (LFM, 1, 2, {"num_hidden_layers": 3, "full_attn_idxs": [0], "conv_L_cache": 5}),
    "the shortest ones, groups": (
        LFM,
        2,
        2,
        {"num_hidden_layers": 7, "full_attn_idxs": [1, 2, 4, 6], "conv_L_cache": 2},
    ),
    "Mamba-2": (GRANITE, 1, 1, {**MAMBA, "num_hidden_layers": 4}),
    "Mamba-2 beside experts": (
        GRANITE,
        2,
        2,
        {**MAMBA, "num_local_experts": 8, "layer_types": [FULL, LINEAR, LINEAR, FULL, FULL, LINEAR, FULL]},
    ),
    "Mamba-2, odd sizes": (
        GRANITE,
        2,
        1,
        {
            **{"layer_types": [LINEAR, FULL, LINEAR, FULL, LINEAR], "mamba_n_heads": 9, "mamba_n_groups": 3},
            **{"mamba_d_state": 7, "mamba_d_conv": 7, "hidden_size": 72, "mamba_d_head": 16, "num_attention_heads": 3},
            **{"num_key_value_heads": 1, "tie_word_embeddings": True, "position_embedding_type": "nope"},
        },
    ),
    "Mamba-2 with biases": (
        BAMBA,
        3,
        1,
        {
            **{"num_hidden_layers": 6, "attn_layer_indices": [2, 4], "mamba_n_groups": 2, "mamba_d_conv": 2},
            **{"attention_bias": True, "mlp_bias": True},
        },
    ),
    "decays by channel": (KIMI, 1, 1, {"layer_types": [LINEAR, FULL, LINEAR, LINEAR, FULL]}),
    "decays by channel, odd sizes, groups": (
        KIMI,
        2,
        2,
        {
            "layer_types": [FULL, LINEAR, LINEAR, FULL, FULL, LINEAR, FULL],
            **{"linear_num_heads": 5, "linear_head_dim": 19, "linear_conv_kernel_dim": 7, "q_lora_rank": 20},
        },
    ),
}


def checkpoint(folder: Path, case: str) -> Path:
    family, cut, group_size, fields = CUTS[case]
    layers = {"num_hidden_layers": len(fields["layer_types"])} if "layer_types" in fields else {}
    more = {"layer_types": None} if "full_attn_idxs" in fields else {}
    return make_checkpoint(folder / "c", family, cut=cut, group_size=group_size, **fields | layers | more)


def tokens_of(count: int = 80) -> Tensor:
    return torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("case", CUTS)
def test_a_cut_equals_the_all_token_reference(case: str, tmp_path: Path) -> None:
    path, tokens = checkpoint(tmp_path, case), tokens_of()
    config, session = config_of(path), eager_session(path, OPTIONS)
    expected, rounding = reference_logits(config, load_weights(path), tokens), model_error(config, len(tokens))
    for chunk in (1, 7, 80):
        driver = StepDriver(session, seed=chunk)
        found = torch.cat([driver.run(part.tolist()) for part in tokens.split(chunk)])
        assert_near(found, expected, rounding, chunk)
    driver = StepDriver(session)  # of the prompt only the last token goes past the cut
    assert driver.run(tokens[:50].tolist(), num_survivors=0).shape == (0, config.vocab_size)
    assert_near(driver.run(tokens[50:].tolist(), num_survivors=1), expected[-1:], rounding)
    resolved = resolve(OPTIONS, config, "F32")
    for export in (export_lower, export_upper):
        verify(export(config, resolved), config, resolved)


def test_what_an_owner_is_and_a_state_keeps() -> None:
    hf = {**SMALL, "model_type": f"{NEXT}_swiftkv", "num_hidden_layers": 12, "full_attention_interval": 2}
    config = load_config({**hf, "num_key_value_layers": 4, "key_value_group_size": 2})
    assert config.owner_of_layer == (-1, 1, -1, 3, -1, 5, -1, 5, -1, 9, -1, 9)
    assert config.upper_owners == (5, 9) and config.upper_linear == (4, 6, 8, 10)
    assert config.state_shapes_of(2)[0] == (3, 2 * 24 + 64) and config.state_shapes_of(4)[0] == (3, 24 + 64)
    assert state_bytes(config, "float32") == 4 * (6 * 4 * 12 * 16 + 3 * (2 * 112 + 4 * 88))


@pytest.mark.parametrize(
    "case",
    [
        *("no sharing", "groups of two, the last one smaller", "gated convolutions", "Mamba-2 beside experts"),
        "decays by channel",
    ],
)
def test_generation_is_that_of_the_reference(case: str, tmp_path: Path) -> None:
    """In chunks, from snapshots, and with drafts of which some are right; every token is the reference's."""
    path = checkpoint(tmp_path, case)
    config, weights, session = config_of(path), load_weights(path), eager_session(path, OPTIONS)
    prompts = [tokens_of(length).tolist() for length in (2, 12, 30, 40)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    expected: dict[tuple[str, int], tuple[list[int]]] = {}
    for chunk, every, drafts in ((128, 1, False), (9, 2, False), (128, 1, True), (14, 2, True)):
        speculative = SpeculativeConfig("ngram", 3) if drafts else None
        limits = {"num_pages": 60, "max_num_tokens": chunk, "snapshot_every": every}
        engine = LLMEngine(session=session, **limits, speculative=speculative)
        if isinstance(engine.drafting, Drafting):
            engine.drafting.drafter = AdversarialDrafter(random.Random(chunk), expected, config.vocab_size)
        for _ in range(2):
            for index, prompt in enumerate(prompts):
                engine.add_request(str(index), prompt, params)
            found: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
            while engine.has_unfinished():
                for output in engine.step():
                    found[output.request_id] += output.new_token_ids
                engine.check_invariants()
            expected = expected or {(index, 0): (tokens,) for index, tokens in found.items()}
            assert {(index, 0): (tokens,) for index, tokens in found.items()} == expected
        stats = engine.stats()
        assert stats["num_reused_tokens"] and bool(stats["num_accepted_draft_tokens"]) == drafts
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([*prompt, *expected[str(index), 0][0]])
        logits = reference_logits(config, weights, ids)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, ids[len(prompt) :, None])[:, 0]
        bound = 2 * model_error(config, len(ids)) * logits.abs().max()
        assert len(ids) == len(prompt) + 24 and (logits.max(-1).values - chosen <= bound).all()


@pytest.mark.parametrize("family", [NEXT, DENSE])
@pytest.mark.parametrize("init", ["copy", "mean", "fold"])
def test_rewire_makes_states_of_the_layers_own_tensors(family: str, init: str, tmp_path: Path) -> None:
    """With equal inputs of all layers, and queries whose convolution looks at no earlier token, the model is the
    teacher: so with layers that add nothing. Names and shapes are those that engines read."""
    path = make_checkpoint(tmp_path / "c", family, num_hidden_layers=4)
    options = RewireOptions(cut=2, init=init, drop_teacher=True)
    rewire_checkpoint(path, tmp_path / "r", options)
    opened = open_model(tmp_path / "r")
    config = read_model_config(opened)
    check_weights(opened, config)
    own, made = load_weights(path), load_file(tmp_path / "r" / "model.safetensors")
    wanted = {source.name for spec in weight_specs(config) for source in spec.sources}
    assert wanted <= {name.replace(".shared_expert.", ".shared_experts.") for name in load_weights(tmp_path / "r")}
    name, linear = "model.layers.2.linear_attn", config.linear
    assert linear is not None
    plain = {spec.name: spec for spec in weight_specs(config_of(path))}
    sources = plain["layers.2.qkvz.weight"].sources + plain["layers.2.ba.weight"].sources
    stored = [own[s.name] if s.rows is None else own[s.name][s.rows.start : s.rows.stop] for s in sources]
    q, kv, z, b, a = torch.cat(stored).split(
        (linear.keys_dim, linear.state_channels, linear.values_dim, linear.num_value_heads, linear.num_value_heads)
    )
    gain = own["model.layers.2.input_layernorm.weight"] + 1 if init == "fold" else torch.ones(64)
    conv = own[f"{name}.conv1d.weight"]
    assert torch.equal(made[f"{name}.in_proj_z_swiftkv.weight"], z)
    assert torch.equal(made[f"{name}.conv1d_swiftkv.weight"], conv[linear.keys_dim :])
    products = roundings_error(2, torch.float32)
    assert_near(made[f"{name}.in_proj_q_swiftkv.weight"], q * conv[: linear.keys_dim, 0, -1:], products)
    for part, rows in (("kv", kv), ("b", b), ("a", a)):
        assert_near(made[f"{name}.in_proj_{part}_swiftkv.weight"], rows * gain, products)
    assert not any(key.startswith(f"{name}.in_proj_") and "_swiftkv" not in key for key in made)


OTHER_STATES = {
    "gated convolutions": (LFM, {"num_hidden_layers": 6, "full_attn_idxs": [1, 4], "layer_types": None}),
    "Mamba-2": (GRANITE, {**MAMBA, "num_hidden_layers": 4}),
    "Mamba-2 with biases": (
        BAMBA,
        {"num_hidden_layers": 5, "attn_layer_indices": [1, 3], "attention_bias": True, "mamba_n_groups": 2},
    ),
    "decays by channel": (KIMI, {"num_hidden_layers": 5, "layer_types": [LINEAR, FULL, LINEAR, FULL, LINEAR]}),
}


@pytest.mark.parametrize("case", OTHER_STATES)
@pytest.mark.parametrize("init", ["copy", "fold"])
def test_with_equal_inputs_of_all_layers_the_model_is_the_teacher(case: str, init: str, tmp_path: Path) -> None:
    """Where no layer above the cut but the last adds anything, and norms have equal gains; and the convolution of
    queries looks at no earlier token, where they have none above a cut."""
    family, fields = OTHER_STATES[case]
    path = make_checkpoint(tmp_path / "c", family, **fields)
    stored, last = load_file(path / "model.safetensors"), fields["num_hidden_layers"] - 1
    norms = "input_layernorm" if family != LFM else "operator_norm"
    gain = stored[f"model.layers.{last}.{norms}.weight"]
    for name, tensor in stored.items():
        layer = int(name.split(".")[2]) if ".layers." in name else -1
        if 2 <= layer < last and any(part in name for part in ("out_proj", "o_proj", "down", "output_linear", ".w2.")):
            tensor.zero_()
        if name.endswith("q_conv1d.weight"):
            tensor[..., :-1] = 0
        if f".{norms}." in name:
            tensor.copy_(gain)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    rewire_checkpoint(path, tmp_path / "r", RewireOptions(cut=2, init=init, drop_teacher=True))
    opened = open_model(tmp_path / "r")
    config, tokens = read_model_config(opened), tokens_of(40)
    check_weights(opened, config)
    assert last in config.upper_linear and config.cut == 2
    made = load_weights(tmp_path / "r")
    assert not any(is_teacher_only(name, 2) for name in made)
    wanted, found = (reference_logits(config_of(p), load_weights(p), tokens) for p in (path, tmp_path / "r"))
    assert_near(found, wanted, model_error(config, len(tokens)))
    made["model.layers.2.input_layernorm.weight"] = 2 * gain
    other = reference_logits(config, made, tokens)
    made["model.norm_swiftkv.weight"] = 2 * made["model.norm_swiftkv.weight"]
    assert not torch.equal(reference_logits(config, made, tokens), other)


def test_what_is_not_fitted_or_trained_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c", DENSE, num_hidden_layers=4)
    latent = make_checkpoint(tmp_path / "latent", KIMI, num_hidden_layers=4)
    for options in (RewireOptions(cut=2, init="ridge"), RewireOptions(cut=None, init="copy")):
        with pytest.raises(
            KvforgeError, match=r"has latent attention, whose K and V are not fitted; give a --cut-layer"
        ):
            rewire_checkpoint(latent, tmp_path / "r", options)
    with pytest.raises(
        KvforgeError,
        match="Layers that keep a state are not supported in this model: it has an early exit; take it without",
    ):
        rewire_checkpoint(path, tmp_path / "r", RewireOptions(cut=2, init="copy", early_exit=True))
    with pytest.raises(
        KvforgeError,
        match="Layers that keep a state are not supported in this model: its cut is blind; take another kind of",
    ):
        rewire_checkpoint(path, tmp_path / "r", RewireOptions(cut=2, num_anchors=4))


def test_a_build_is_not_calibrated_with_a_cut(tmp_path: Path) -> None:
    """By itself it rounds to the nearest; a text that is asked for is refused."""
    path = make_checkpoint(tmp_path / "c", DENSE, cut=2, dtype=torch.bfloat16)
    options = dataclasses.replace(OPTIONS, weight_dtype="int4", dtype="bfloat16")
    assert eager_session(path, options).manifest.calibration is None
    with pytest.raises(BuildError, match="layers above a cut that keep a state, which of every token would be in mem"):
        eager_session(path, dataclasses.replace(options, calibration="package"))


def test_an_engine_says_what_it_does_not_compute(tmp_path: Path) -> None:
    llm = LLM(session=eager_session(checkpoint(tmp_path, "no sharing"), OPTIONS), num_pages=20)
    asked = SamplingParams(max_tokens=1, prompt_logprobs=1)
    with pytest.raises(RequestError, match="layers above the model's cut read states, and those behind the prompt's"):
        llm.generate([[5, 6, 7]], asked, use_tqdm=False)


@pytest.mark.parametrize(("chunk", "drafts"), [(128, 3), (11, 3), (7, 0)])
def test_scores_are_the_references(chunk: int, drafts: int, tmp_path: Path) -> None:
    """Each scored token has a row of states: as many as drafts of all sequences are computed in a step."""
    path = checkpoint(tmp_path, "groups of two, the last one smaller")
    config, weights, ids = config_of(path), load_weights(path), tokens_of()
    limits = dict(num_pages=40, max_num_tokens=chunk, max_num_seqs=3, snapshot_every=2, num_snapshots=9)
    session = eager_session(path, dataclasses.replace(OPTIONS, max_draft_len=drafts))
    llm, shared = LLM(session=session, **limits), ids.tolist()  # type: ignore[arg-type]
    requests = [(shared[:size], shared[size : size + count]) for size, count in ((1, 30), (12, 9), (40, 1), (60, 20))]
    expected = reference_logits(config, weights, ids).log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    for _ in range(2):
        for (context, continuation), found in zip(requests, score(llm, requests), strict=True):
            rows = slice(len(context) - 1, len(context) + len(continuation) - 1)
            assert_near(found.logprobs, expected[rows], model_error(config, len(ids)), (len(context), chunk))
        llm.engine.check_invariants()
        assert llm.engine.stats()["num_used_state_rows"] == 0 < llm.engine.stats()["num_held_snapshots"]


def test_a_survivor_has_a_state(tmp_path: Path) -> None:
    driver = StepDriver(eager_session(checkpoint(tmp_path, "no sharing"), OPTIONS))
    driver._rows = lambda count, survivors: (torch.tensor([-1]).int(), torch.full((count,), -1).int())  # type: ignore
    with pytest.raises(AssertionError, match="a survivor has no state"):
        driver.run([5, 6, 7])


def test_the_upper_graph_reads_its_own_states() -> None:
    config = load_config({**SMALL, "model_type": f"{DENSE}_swiftkv", "num_key_value_layers": 1})
    resolved = resolve(OPTIONS, config, "F32")
    graph = export_upper(config, resolved)
    calls = [node for node in graph.program.graph.nodes if "gated_delta_rule" in str(node.target)]
    assert len(calls) == 2
    calls[1].args = (*calls[1].args[:-1], calls[0].args[-1])
    with pytest.raises(BuildError, match="calls kvforge::gated_delta_rule on another pool than"):
        verify(graph, config, resolved)


def test_costs_of_a_cut_by_hand() -> None:
    """Every matrix of the graphs, 2 FLOPs a weight, attention, and what states take."""
    hf = {**SMALL, "model_type": f"{DENSE}_swiftkv", "num_hidden_layers": 8, "num_key_value_layers": 4}
    config = load_config(hf)
    sizes = {
        spec.name: dataclasses.replace(spec).num_parameters for spec in weight_specs(config) if len(spec.shape) == 2
    }
    below = ("layers.0.", "layers.1.", "layers.2.", "layers.3.", "single_input.", "state_input.")
    lower = sum(size for name, size in sizes.items() if name.startswith(below))
    everything = sum(sizes.values()) - sizes["embed.weight"]
    assert step_weights(config) == everything
    numbers, read = 4 * 12 * 16, 2 * 4 * 12 * 16
    updates = 3 * (5 * numbers + 2 * 4 * 112) + 3 * (5 * numbers + 2 * 4 * 88)
    assert skipped_token(config, 100).total == 2 * lower + updates + 3 * read + 4 * 64 * 50.5
    assert full_token(config, 7).total == 2 * everything + updates + 6 * read + 2 * 4 * 64 * 7
    with pytest.raises(ModelError, match="its cut is blind"):
        dataclasses.replace(config, num_anchors=2)


def test_costs_of_a_cut_with_decays_by_channel_by_hand() -> None:
    """The same; of latents each head's part is a matrix of its own, which a token of a prompt takes once an owner."""
    kinds = [LINEAR, FULL, LINEAR, LINEAR, FULL, LINEAR]
    fields = {"layer_types": kinds, "num_hidden_layers": 6, "linear_num_heads": 3, "linear_head_dim": 16}
    dense = {"mlp_layer_types": ["dense"] * 6, "num_key_value_layers": 3}
    config = load_config({**SMALL, **fields, **dense, "model_type": f"{KIMI}_swiftkv"})
    matrices = [spec for spec in weight_specs(config) if len(spec.shape) == 2 or ".of_heads." in spec.name]
    sizes = {spec.name: spec.num_parameters for spec in matrices}
    below = ("layers.0.", "layers.1.", "layers.2.", "single_input.", "state_input.")
    expanded = sum(size for name, size in sizes.items() if name.startswith("layers.4.of_heads."))
    decays = [name for name in sizes if name.endswith("state.decays.weight") and not name.startswith(below)]
    lower = sum(size for name, size in sizes.items() if name.startswith(below) or name in decays)
    everything = sum(sizes.values()) - sizes["embed.weight"]
    assert step_weights(config) == everything and len(decays) == 2
    numbers, read = 3 * 16 * 16, 2 * 3 * 16 * 16
    updates = 2 * (5 * numbers + 2 * 4 * 144) + 2 * (5 * numbers + 2 * 4 * 96)
    of_key = 2 * (4 * 24 + 4 * 12)
    assert skipped_token(config, 100).total == 2 * lower + updates + 2 * read + of_key * 50.5
    of_row = 2 * 4 * (2 * 32 + 8)
    assert full_token(config, 7).total == 2 * everything + updates + 4 * read + 2 * of_row * 7
    assert expanded == 4 * 32 * (16 + 12)


@pytest.mark.parametrize("family", [LFM, GRANITE])
def test_costs_of_a_cut_of_other_states_by_hand(family: str) -> None:
    """Survivors convolve once more than other tokens."""
    kinds = [LINEAR, FULL, LINEAR, LINEAR, LINEAR, FULL]
    fields = {"full_attn_idxs": [1, 4]} if family == LFM else MAMBA | {"layer_types": kinds}
    hf = {**SMALL, **fields, "model_type": f"{family}_swiftkv", "num_hidden_layers": 6, "num_key_value_layers": 3}
    config = load_config(hf | ({"block_auto_adjust_ff_dim": False} if family == LFM else {"num_local_experts": 0}))
    sizes = {spec.name: spec.num_parameters for spec in weight_specs(config) if len(spec.shape) == 2}
    below = ("layers.0.", "layers.1.", "layers.2.", "single_input.", "state_input.")
    lower = sum(size for name, size in sizes.items() if name.startswith(below))
    everything = sum(sizes.values()) - (0 if config.tie_embeddings else sizes["embed.weight"])
    assert step_weights(config) == everything
    if family == LFM:
        read, update, own = 64, (2 * 3 + 1) * 64, (2 * 3 + 1) * 64
        numbers = 4 * (2 * 2 * 64 + 2 * 3 * 64)
    else:
        channels, inner = 128 + 2 * 2 * 20, 128
        read, update, own = 2 * 21 * inner, 3 * 20 * inner + 2 * 4 * channels, 2 * 4 * channels
        numbers = 4 * (4 * 20 * inner + 2 * 3 * channels + 2 * 4 * channels)
    assert state_bytes(config, "float32") == numbers
    heads, dim = config.num_heads, config.head_dim
    assert skipped_token(config, 100).total == 2 * lower + 4 * update + 2 * read + 4 * heads * dim * 50.5
    assert full_token(config, 7).total == 2 * everything + 4 * (update + read) + 2 * own + 2 * 4 * heads * dim * 7
