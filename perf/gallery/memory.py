"""Bytes of one sequence's cache over its length, for every mechanism that makes the cache smaller: the planner's."""

from dataclasses import dataclass
from pathlib import Path

from kvforge.common.figures import new_figure, save_figure
from kvforge.common.number_formats import KV_FORMATS
from kvforge.costs.cache import owner_cache
from kvforge.costs.shape import ModelShape
from kvforge.kv_policies import Full, of_cache, parse
from kvforge.planning.presets import PRESETS
from perf.gallery.figure import Figure, Report

MODEL, CUT, GROUP_SIZE, PAGE_SIZE = "llama-3.1-8b", 16, 4, 64
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

    def shape(self, model: ModelShape) -> ModelShape:
        """Return the model with its cut and groups."""
        return model.with_cut(CUT, self.group_size) if self.cut else model.without_cut()

    def device_bytes(self, model: ModelShape, tokens: int) -> int:
        """Return what a computed prompt of ``tokens`` keeps on the device; a cache of groups keeps its newest page
        exact besides."""
        shape = self.shape(model)
        cache = owner_cache(shape, self.kv_dtype, PAGE_SIZE)
        kept = of_cache(parse(self.policy), self.kv_dtype).device_bytes(cache, tokens)
        if KV_FORMATS[self.kv_dtype].is_grouped:
            kept += owner_cache(shape, "bfloat16", PAGE_SIZE).token_bytes * PAGE_SIZE
        return shape.num_owners * kept

    def host_bytes(self, model: ModelShape, tokens: int) -> int:
        """Return what it keeps in host memory."""
        shape = self.shape(model)
        cache = owner_cache(shape, self.kv_dtype, PAGE_SIZE)
        return shape.num_owners * of_cache(parse(self.policy), self.kv_dtype).host_bytes(cache, tokens)


MECHANISMS = (
    Mechanism("full, bf16"),
    Mechanism("cut 16", cut=True),
    Mechanism("cut 16, 4-way AcrossKV", cut=True, group_size=4),
    Mechanism("fp8", kv_dtype="fp8"),
    Mechanism("int4", kv_dtype="int4"),
    Mechanism("kivi2", kv_dtype="kivi2"),
    Mechanism("ShadowKV", policy="shadowkv"),
    Mechanism("eviction to 2048", policy="snapkv:budget=2048"),
    Mechanism("cut 16, 4-way, kivi2", cut=True, group_size=4, kv_dtype="kivi2"),
)


def make() -> Report:
    """Return the bytes of every mechanism at every length, and how many times smaller the longest one is than full."""
    model = PRESETS[MODEL].shape
    full = MECHANISMS[0].device_bytes(model, LENGTHS[-1])
    return {
        "model": MODEL,
        "page_size": PAGE_SIZE,
        "lengths": LENGTHS,
        "rows": [
            {
                "name": mechanism.name,
                "device_bytes": [mechanism.device_bytes(model, tokens) for tokens in LENGTHS],
                "host_bytes": [mechanism.host_bytes(model, tokens) for tokens in LENGTHS],
                "times_smaller": full / mechanism.device_bytes(model, LENGTHS[-1]),
            }
            for mechanism in MECHANISMS
        ],
    }


def plot(report: Report, path: Path) -> None:
    """Draw a line for each mechanism, both axes logarithmic."""
    figure = new_figure(7.5, 5)
    axes = figure.subplots()
    for index, row in enumerate(report["rows"]):
        style = "--" if row["name"] == "cut 16" else "-"
        label = f"{row['name']}, {row['times_smaller']:.1f}×"
        sizes = [size / GIB for size in row["device_bytes"]]
        axes.plot(report["lengths"], sizes, style, marker="o", ms=3, color=f"C{index}", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="tokens of the prompt", ylabel="GiB of one sequence on the device", title=report["model"])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    save_figure(figure, path)


MEMORY = Figure("memory", make, plot)
