"""Bytes of one sequence's cache over its length, for every mechanism that makes the cache smaller: the planner's."""

from dataclasses import dataclass
from pathlib import Path

from kvforge.costs.cache import owner_cache
from kvforge.kv_policies import Full, of_cache, parse
from kvforge.planning.cuts import with_cut, without_cut
from kvforge.planning.presets import PRESETS
from model_defs import ModelConfig
from perf.gallery.figure import Figure, Report
from perf.harness.plots import panels

MODEL, CUT, PAGE_SIZE = "llama-3.1-8b", 16, 64
LENGTHS = tuple(2**power for power in range(9, 18))
GIB = 2**30


@dataclass(frozen=True)
class Mechanism:
    """A cache of the model: cut at ``CUT`` or not, with layers that share one, in a format, under a policy."""

    name: str
    cut: bool = False
    group_size: int = 1
    kv_dtype: str = "bfloat16"
    policy: str = Full.name

    def num_bytes(self, model: ModelConfig, tokens: int) -> tuple[int, int]:
        """Return what a computed prompt of ``tokens`` keeps on the device, and in host memory."""
        shape = with_cut(model, CUT, self.group_size) if self.cut else without_cut(model)
        policy, cache = of_cache(parse(self.policy), self.kv_dtype), owner_cache(shape, self.kv_dtype, PAGE_SIZE)
        sizes = policy.device_bytes(cache, tokens), policy.host_tier.host_bytes(cache, tokens)
        return shape.num_owners * sizes[0], shape.num_owners * sizes[1]


MECHANISMS = (
    Mechanism("full, bf16"), Mechanism("cut 16", cut=True), Mechanism("cut 16, 4-way AcrossKV", cut=True, group_size=4),
    Mechanism("fp8", kv_dtype="fp8"), Mechanism("int4", kv_dtype="int4"), Mechanism("kivi2", kv_dtype="kivi2"),
    Mechanism("ShadowKV", policy="shadowkv"), Mechanism("eviction to 2048", policy="snapkv:budget=2048"),
    Mechanism("cut 16, 4-way, kivi2", cut=True, group_size=4, kv_dtype="kivi2"),
)  # fmt: skip


def make() -> Report:
    """Return the bytes of every mechanism at every length, and how many times smaller the longest one is than full."""
    model = PRESETS[MODEL].model
    sizes = {mechanism.name: [mechanism.num_bytes(model, tokens) for tokens in LENGTHS] for mechanism in MECHANISMS}
    full, _ = sizes[MECHANISMS[0].name][-1]
    return {
        "model": MODEL,
        "page_size": PAGE_SIZE,
        "lengths": LENGTHS,
        "rows": [
            {
                "name": name,
                "device_bytes": [on_device for on_device, _ in each],
                "host_bytes": [on_host for _, on_host in each],
                "times_smaller": full / each[-1][0],
            }
            for name, each in sizes.items()
        ],
    }


def plot(report: Report, path: Path) -> None:
    """Draw a line for each mechanism, both axes logarithmic."""
    with panels(path, 7.5, 5, legend=7) as (axes,):
        for index, row in enumerate(report["rows"]):
            style = "--" if row["name"] == "cut 16" else "-"
            label = f"{row['name']}, {row['times_smaller']:.1f}×"
            sizes = [size / GIB for size in row["device_bytes"]]
            axes.plot(report["lengths"], sizes, style, marker="o", ms=3, color=f"C{index}", label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set(xlabel="tokens of the prompt", ylabel="GiB of one sequence on the device", title=report["model"])


MEMORY = Figure("memory", make, plot)
