"""GroupedAttention on CPU against its definition."""

import plugins
from plugins.grouped_attention.cases import random_case
from tests.support.operators.backends import run_cpu
from tests.support.operators.cases import difference, reference


def test_the_kernel_is_its_definition() -> None:
    plugins.load_library()
    for seed in range(25):
        args = random_case(seed, small=True)
        wrong = difference(
            "grouped_attention", args, run_cpu("grouped_attention", args), reference("grouped_attention", args)
        )
        assert wrong is None, (seed, wrong)
