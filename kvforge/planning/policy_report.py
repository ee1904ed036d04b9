"""What a plan says of a KV policy, as text."""

from typing import Any

from kvforge.common.byte_sizes import format_bytes
from kvforge.common.text_table import align
from kvforge.planning.capacity import GIB

_SIZES = ("device_bytes", "host_bytes", "full_bytes")
_READS = ("step_device_bytes_read", "step_host_bytes_read", "step_full_bytes_read")


def describe_policy(plan: dict[str, Any]) -> str:
    """Return the tables of ``kvforge.planning.sequence_memory.plan_policy``."""
    parameters = ", ".join(f"{name} {value}" for name, value in plan["parameters"].items())
    head = (
        f"KV policy {plan['name']}{f' ({parameters})' if parameters else ''}:\n"
        f"one sequence after a prompt of {plan['context']} tokens, pages of {plan['page_size']}; most that its decode "
        "step reads, over all layers"
    )
    rows = [["", "device", "host", "in full", "smaller", "than no cut", "read", "from host", "read in full"]]
    for row in plan["variants"]:
        rows.append(
            [
                row["name"],
                *(format_bytes(row[name]) for name in _SIZES),
                f"{row['times_smaller']:.2f}x",
                f"{row['times_smaller_than_first_in_full']:.2f}x",
                *(format_bytes(row[name]) for name in _READS),
            ]
        )
    blocks = [f"{head}\n{align(rows)}"]
    largest = max(row["prefill_bytes"] for row in plan["variants"])
    if largest:
        blocks.append(
            f"A prompt is computed in full first: until it is, it takes up to {format_bytes(largest)} of pages more."
        )
    if "capacity" in plan:
        blocks.append(_capacity(plan["capacity"]))
    return "\n\n".join(blocks)


def _capacity(memories: list[dict[str, Any]]) -> str:
    rows = [["", *(f"{memory['memory_gib_per_gpu']:g} GiB" for memory in memories)]]
    for i, first in enumerate(memories[0]["variants"]):
        found = [memory["variants"][i] for memory in memories]
        cells = [
            f"{row['sequences']} ({row['sequences_in_full']}; {format_bytes(row['host_gib'] * GIB)})" for row in found
        ]
        rows.append([first["name"], *cells])
    head = "Sequences that fit, one prompt being computed (in full; host memory of all), by memory per GPU"
    return f"{head}\n{align(rows)}"
