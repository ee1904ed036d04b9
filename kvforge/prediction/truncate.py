"""An auxiliary model to begin with: the lower layers of another one."""

import json
from pathlib import Path

from kvforge.checkpoint.copy_files import copy_files
from kvforge.checkpoint.output import check_output
from kvforge.checkpoint.sharded_writer import write_sharded
from kvforge.common.errors import KvforgeError
from kvforge.common.staging import staging_directory
from kvforge.distill.export import MAX_SHARD_BYTES
from kvforge.rewire.source import open_source

_OF_LAYERS = ("layer_types", "no_rope_layers")
"""Lists of config.json with an entry a layer."""


def truncate(source: str | Path, output: str | Path, num_layers: int, *, overwrite: bool = False) -> None:
    """Write the checkpoint of the first ``num_layers`` layers of ``source``, with its embedding, final norm and head.
    ``overwrite`` replaces a checkpoint at ``output``.

    Raises:
        CheckpointError: the source cannot be read, is quantized or has a cut.
        KvforgeError: it has not as many layers, or ``output`` may not be written (``check_output``).
    """
    output = Path(output)
    check_output(output, [Path(source)], overwrite)
    opened = open_source(source)
    if not 1 <= num_layers <= opened.config.num_layers:
        raise KvforgeError(
            f"--layers is {num_layers}; {source} has {opened.config.num_layers}, give 1 or more of them."
        )
    prefix = "model.layers."
    specs = [
        spec
        for name, spec in opened.specs.items()
        if not name.startswith(prefix) or int(name.removeprefix(prefix).split(".")[0]) < num_layers
    ]
    hf_config = dict(opened.checkpoint.hf_config) | {"num_hidden_layers": num_layers}
    for key in _OF_LAYERS:
        if isinstance(hf_config.get(key), list):
            hf_config[key] = hf_config[key][:num_layers]
    with staging_directory(output, replace=overwrite) as staging:
        write_sharded(staging, specs, lambda spec: opened.checkpoint.read_raw(spec.name), MAX_SHARD_BYTES)
        (staging / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n", encoding="utf-8")
        copy_files(opened.checkpoint.folder, staging)
