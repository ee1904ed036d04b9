"""A student's checkpoint from the weights that distillation trained elsewhere.

    python -m perf.real_model.assemble REWIRED student.safetensors STUDENT

REWIRED is what ``kvforge rewire`` made of the same model with the same cut and groups, with any ``--init``; the weights
are those that ``perf.gpu.student`` has left. STUDENT is as ``kvforge distill`` writes it.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.checkpoint.output import check_output
from kvforge.common.errors import KvforgeError
from kvforge.distill.export import export_checkpoint
from kvforge.distill.trained_parameters import is_trained
from kvforge.swiftkv import SwiftKVForCausalLM
from perf.harness.command import make_parser, run_main
from perf.harness.options import place


def assemble(rewired: Path, weights: Path, output: Path) -> None:
    """Write the student. Raises KvforgeError where the weights are not those that this cut has trained."""
    check_output(output, [rewired, weights], overwrite=False)
    checkpoint = open_model(rewired)
    sizes = read_model_config(checkpoint)
    with torch.device("meta"):
        shapes = {name: tuple(one.shape) for name, one in SwiftKVForCausalLM(sizes).state_dict().items()}
    trained = load_file(weights)
    wanted = {name: shape for name, shape in shapes.items() if is_trained(name, sizes.cut, "partial")}
    if {name: tuple(tensor.shape) for name, tensor in trained.items()} != wanted:
        raise KvforgeError(f"{weights} has not the weights that {rewired} trains; rewire with its cut and groups.")
    export_checkpoint(checkpoint, output, shapes, trained, sizes.cut)


def main() -> None:
    """Parse the command line and write."""
    args = make_parser(__doc__, place("rewired"), place("weights"), place("student")).parse_args()
    assemble(args.rewired, args.weights, args.student)
    print(args.student)


if __name__ == "__main__":
    raise SystemExit(run_main(main))
