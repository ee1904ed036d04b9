"""Networks' inputs for each plugin, taken from the random cases that all faces of the operators are tested on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from plugins import random_cases
from plugins.random_cases import FORMATS, CacheFormat
from tests.trt.aot_driver import Dynamic, Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NUM_SPLITS = 16


@dataclass(frozen=True)
class PluginCase:
    """What a plugin gets, and what the operator's definition says of its outputs.

    `outputs` are (dtype, shape), `aliases` maps an output's index to that of its input, or -1.
    """

    plugin: str
    inputs: tuple[Tensor, ...]
    attributes: dict[str, float | int]
    outputs: list[tuple[torch.dtype, tuple[int, ...]]]
    aliases: dict[int, int]


def _tensor(tensor: torch.Tensor, dynamic: Sequence[int] = (0,)) -> Tensor:
    """The input in the network: these dimensions differ from step to step."""
    return Tensor(tensor.dtype, tuple(Dynamic(n) if i in dynamic else n for i, n in enumerate(tensor.shape)))


def _new(*outputs: tuple[torch.dtype, tuple[int, ...]]) -> tuple[list, dict[int, int]]:
    return list(outputs), {index: -1 for index in range(len(outputs))}


def rope_paged_kv_write(seed: int, cache: CacheFormat, dtype: torch.dtype) -> PluginCase:
    arguments = random_cases.rope_paged_kv_write_case(seed, small=True, dtypes=(dtype,), formats=(cache,))
    tensors = [_tensor(x) for x in arguments[:9] if isinstance(x, torch.Tensor)]
    pools = tensors[5:]
    return PluginCase(
        "RopePagedKvWriteDynamic" if cache.dynamic else "RopePagedKvWrite",
        tuple(tensors),
        {} if cache.dynamic else {"k_scale": arguments[9], "v_scale": arguments[10]},
        [(pool.dtype, tuple(pool.shape)) for pool in pools],
        {index: 5 + index for index in range(len(pools))},
    )


def paged_attention(seed: int, cache: CacheFormat, dtype: torch.dtype, part: str = "") -> PluginCase:
    arguments = random_cases.paged_attention_case(seed, small=True, dtypes=(dtype,), formats=(cache,))
    q, _, _, _, kv_length, page_table = arguments[:6]
    tensors = [_tensor(x) for x in (*arguments[:5],)] + [_tensor(page_table, (0, 1))]
    tensors += [_tensor(x) for x in arguments[8:10] if x is not None]
    attributes = {"scale": arguments[6], "window": arguments[7]}
    if not cache.dynamic:
        attributes |= {"k_scale": arguments[10], "v_scale": arguments[11]}
    partial = (*kv_length.shape, q.shape[1], NUM_SPLITS, q.shape[2] + 2)
    if part:
        attributes["num_splits"] = NUM_SPLITS
    if part == "Combine":
        tensors.append(Tensor(torch.float32, (Dynamic(partial[0]), *partial[1:])))
    outputs, aliases = _new((torch.float32, partial) if part == "Partial" else (q.dtype, tuple(q.shape)))
    name = f"PagedAttention{part}{'Dynamic' if cache.dynamic else ''}"
    return PluginCase(name, tuple(tensors), attributes, outputs, aliases)


def low_rank_key_reconstruct(seed: int, dtype: torch.dtype) -> PluginCase:
    arguments = random_cases.low_rank_key_reconstruct_case(seed, small=True, dtypes=(dtype,))
    rows, sv = arguments[3], arguments[1]
    outputs, aliases = _new((dtype, (*rows.shape, sv.shape[3])))
    return PluginCase("LowRankKeyReconstruct", tuple(map(_tensor, arguments)), {}, outputs, aliases)


def speculative_verify(seed: int) -> PluginCase:
    arguments = random_cases.speculative_verify_case(seed, small=True)
    outputs, aliases = _new(*((torch.int32, tuple(arguments[4].shape)),) * 2)
    return PluginCase("SpeculativeVerify", tuple(map(_tensor, arguments)), {}, outputs, aliases)


def landmark_select_scores(seed: int, dtype: torch.dtype) -> PluginCase:
    arguments = random_cases.landmark_select_case(seed, small=True, dtypes=(dtype,))
    q, landmarks, is_outlier, starts, table, counts, *_, scale, _ = arguments
    tensors = (q, landmarks, is_outlier.to(torch.int8), starts, table, counts)
    inputs = tuple(_tensor(x, (0, 1) if x is table else (0,)) for x in tensors)
    outputs, aliases = _new((torch.float32, (len(counts), q.shape[1], table.shape[1] * landmarks.shape[1])))
    return PluginCase("LandmarkSelectScores", inputs, {"scale": scale}, outputs, aliases)


def landmark_select_choose(seed: int) -> PluginCase:
    q, landmarks, *_, table, counts, selected, _, most = random_cases.landmark_select_case(seed, small=True)
    scores = torch.empty(len(counts), q.shape[1], table.shape[1] * landmarks.shape[1])
    kv_heads = landmarks.shape[2]
    outputs, aliases = _new((torch.int32, (len(counts), kv_heads, most)))
    inputs = (_tensor(scores, (0, 2)), _tensor(counts), _tensor(selected))
    return PluginCase("LandmarkSelectChoose", inputs, {"kv_heads": kv_heads, "max_selected": most}, outputs, aliases)


def _cached(make: Callable[..., PluginCase], *more: str) -> list[PluginCase]:
    """One case per format of the cache, float16 for q or k, and the other float types with a cache of their own."""
    cases = [make(seed, cache, torch.float16, *more) for seed, cache in enumerate(FORMATS)]
    return cases + [make(seed, FORMATS[0], dtype, *more) for seed, dtype in ((7, torch.float32), (8, torch.bfloat16))]


def all_cases() -> list[PluginCase]:
    return [
        *_cached(rope_paged_kv_write),
        *(case for part in ("", "Partial", "Combine") for case in _cached(paged_attention, part)),
        *(low_rank_key_reconstruct(seed, dtype) for seed, dtype in enumerate(FLOATS)),
        *(speculative_verify(seed) for seed in (1, 2)),
        *(landmark_select_scores(seed, dtype) for seed, dtype in zip((1, 2, 4), FLOATS, strict=True)),
        *(landmark_select_choose(seed) for seed in (1, 2)),
    ]


def case_id(case: PluginCase) -> str:
    kinds = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in case.inputs)
    return f"{case.plugin}-{'-'.join(kinds)}"
