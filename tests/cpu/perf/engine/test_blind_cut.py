"""The benchmark of blind cuts: what its requests keep, and its table."""

from argparse import Namespace

from model_defs import load_config
from perf.engine.blind_cut import EXPERIMENT, SHAPES, kept, models

ARGS = Namespace(input_tokens=8192, output_tokens=48)


def test_what_requests_keep() -> None:
    """Of 48 output tokens the last is never written; 32 anchors and the prompt's last token are seen above the cut."""
    owners = {"213M": [16, 9, 16], "8B/8": [4, 3, 4]}
    assert list(owners) == list(SHAPES)
    for shape, numbers in owners.items():
        made = models(shape)
        found = {name: kept(load_config(hf), ARGS) for name, hf in made.items()}
        assert found == dict.fromkeys(made, (8239, 8239)) | {"blind": (8239, 32 + 1 + 47)}
        assert [load_config(hf).num_owners for hf in made.values()] == numbers


def test_the_table() -> None:
    row = {"model": "blind", "batch": 1, "step_s": 0.028, "of_single_input": 0.8}
    row |= {"cache_read_bytes": 64 << 20, "reads_of_single_input": 0.5, "allocated_bytes": 8, "planned_bytes": 8}
    report = {"command": "c", "machine": "m", "shape": "213M", "input_tokens": 8192, "output_tokens": 48, "rows": [row]}
    assert "| blind | 1 | 28.0 | 0.80 | 64.0 | 0.50 | 0.00 | 1.0000 |" in EXPERIMENT.show(report)
