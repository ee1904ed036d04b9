"""LatentKvWrite: rotate the shared key of latent attention's rows by its position and write them to their slots."""

from plugins.latent_kv_write.reference import reference
from plugins.operator import Operator, Variants
from plugins.registration import define

OPERATOR = define(
    Operator(
        reference,
        version=1,
        writes=("k_pool", "k_scales"),
        graphs=("lower",),
        # No contraction: the rotation is then bit for bit the reference's.
        variants={"cpu_kernel.cpp": Variants(flags=("-ffp-contract=off",))},
    )
)
latent_kv_write = OPERATOR.write
