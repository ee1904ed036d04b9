"""The experiments, the most valuable first. Whoever adds one adds an entry, and nothing else."""

from perf.gpu.queue.experiment import Experiment
from perf.gpu.queue.sources import GRAPHS, TIMING

_ATTENTION = ("plugins/paged_attention/cuda*.py", "plugins/triton_*.py", "perf/gpu/attention.py", *TIMING)
_8B = ("perf/gpu/models.py", "perf/gpu/llama8b.py", *TIMING, *GRAPHS)
_SCHEDULER = ("kvforge/runtime/scheduling/*.py", "kvforge/runtime/step/*.py")

_DISTILLATION = ("kvforge/distill/*.py", "kvforge/rewire/*.py", "kvforge/swiftkv/*.py")


def _llama8b(inputs: int, seconds: int, requests: int) -> Experiment:
    """Every variant at one length of prompts."""
    return Experiment(
        f"llama8b-{inputs // 1024}k",
        f"8B shape, {inputs} in, 256 out: no cut, cut 16, + 4-way, + FP8 cache",
        seconds,
        "perf.gpu.llama8b",
        ("--inputs", str(inputs), "--requests", str(requests)),
        ("--tiny", "--inputs", "48", "--requests", "2", "--variants", "cut16-4way"),
        (*_8B, *_SCHEDULER, "perf/gpu/costs.py"),
    )


EXPERIMENTS = (
    Experiment(
        "tensorrt-rtx", "does TensorRT for RTX load and run plans on this GPU?", 30, "perf.gpu.tensorrt_rtx",
        ("--plans", "{carried}/plans"), ("--tiny",), ("perf/gpu/tensorrt_rtx.py", "kvforge/compiler/onnx_export.py"),
        carried=("tensorrt-rtx", "plans"),
    ),
    Experiment(
        "operators", "which share of their floors do attention and cache writes reach, beside cuDNN and flash?", 60,
        "perf.gpu.operators", (), ("--tiny", "--formats", "bf16"),
        ("perf/gpu/operators.py", "plugins/rope_paged_kv_write/cuda*.py", *_ATTENTION),
    ),
    Experiment(
        "profile", "which kernels take the time of a prompt and of a decode step?", 150, "perf.gpu.profile", (),
        ("--tiny",), ("perf/gpu/profile.py", *_8B),
    ),
    _llama8b(8192, 330, 64), _llama8b(2048, 60, 256), _llama8b(32768, 90, 16),
    Experiment(
        "tunings", "which block sizes of attention are the fastest?", 90, "perf.gpu.tunings",
        ("--kernels", "{carried}/tunings"), ("--tiny",), ("perf/gpu/tunings.py", *_ATTENTION), carried=("tunings",),
    ),
    Experiment(
        "operators-fa3", "the same beside FlashAttention 3", 75, "perf.gpu.operators", (),
        ("--tiny", "--formats", "fp8"), ("perf/gpu/operators.py", *_ATTENTION), carried=("fa3",),
    ),
    Experiment(
        "shadowkv", "decoding 60K and 122K tokens in large batches: ShadowKV beside full attention", 240,
        "perf.gpu.shadowkv", (), ("--tiny", "--steps", "2"),
        ("perf/gpu/shadowkv.py", "perf/shadowkv/decode.py", "kvforge/kv_policies/shadowkv/*.py", *_8B),
    ),
    Experiment(
        "pieces", "what do graphs in pieces save in compiling, and cost in a step?", 300, "perf.gpu.pieces", (),
        ("--tiny", "--layers", "3", "--rounds", "2"), ("perf/gpu/pieces.py", "perf/gpu/profile.py", *_8B),
    ),
    Experiment(
        "suite", "do the tests that need a GPU pass?", 330, "perf.gpu.suite", (), ("--tiny",),
        ("perf/gpu/suite.py", "tests/gpu/*.py", *GRAPHS),
    ),
    _llama8b(131072, 150, 6),
    Experiment(
        "student",
        "how much of a real model's damage by a cut at half does a quarter of an hour's distillation recover?", 530,
        "perf.gpu.student", ("--smollm2", "{carried}/smollm2", "--seconds", "505"), ("--tiny",),
        (
            "perf/gpu/student.py", "perf/gpu/student_*.py", "perf/real_model/sampled.py", "perf/real_model/outputs.py",
            "perf/real_model/recovery.py", *_DISTILLATION,
        ),
        carried=("smollm2", "gguf"),
    ),
)  # fmt: skip
