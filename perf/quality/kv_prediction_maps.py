"""How far predicted K and V are from the model's own, by layer and position."""

from pathlib import Path

import torch

from kvforge.prediction.load import load_pair
from kvforge.swiftkv import make_layout
from perf.harness.engines import TEACHER_DIR
from perf.quality.swiftkv_students import held_out_documents

NUM_DOCUMENTS, LENGTH, BIN = 16, 480, 16


@torch.inference_mode()
def differences(predictor: Path) -> dict[str, list[list[float]]]:
    """Return for K, rotated, and for V ``[layers, positions / BIN]``: ||predicted - own|| / ||own|| in fp32, on average
    over the positions of a bin and held-out documents."""
    base, module = load_pair(TEACHER_DIR, predictor, torch.float32)
    documents = [ids[:LENGTH] for ids in held_out_documents(NUM_DOCUMENTS) if len(ids) >= LENGTH]
    total = torch.zeros(2, base.sizes.num_layers, LENGTH)
    layout, auxiliary = (make_layout(sizes, LENGTH) for sizes in (base.sizes, module.prediction.auxiliary))
    for document in documents:
        ids = torch.tensor([document])
        predicted, hidden = module.predict(module.inputs(ids, auxiliary), base, layout), base.model.embed(ids)
        for index, layer in enumerate(base.model.layers):
            own = layer.self_attn.key_value(layer.input_layernorm(hidden), layout)
            for half in (0, 1):
                off = (predicted[index][half] - own[half])[0].flatten(1).norm(dim=1)
                total[half, index] += off / own[half][0].flatten(1).norm(dim=1)
            hidden = layer(hidden, own, layout)
    means = (total / len(documents)).unflatten(-1, (-1, BIN)).mean(-1)
    return {name: means[half].tolist() for half, name in enumerate(("k", "v"))}
