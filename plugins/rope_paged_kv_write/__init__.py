"""RopePagedKvWrite: rotate K by its position and write K and V to their slots in the paged pools."""

from torch import Tensor

from plugins.errors import PluginError
from plugins.operator import Operator, Variants
from plugins.registration import define, writes_are_functional
from plugins.rope_paged_kv_write.functional import define_twin
from plugins.rope_paged_kv_write.reference import reference

OPERATOR = define(
    Operator(
        reference,
        version=4,
        writes=("k_pool", "v_pool", "k_scales", "v_scales"),
        graphs=("lower",),
        # No contraction: the rotation is then bit for bit the reference's.
        variants={"cpu_kernel.cpp": Variants(flags=("-ffp-contract=off",))},
    )
)
_FUNCTIONAL, _FUNCTIONAL_DYNAMIC = define_twin(OPERATOR, dynamic=False), define_twin(OPERATOR, dynamic=True)


def rope_paged_kv_write(
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    rotates_keys: bool = False,
) -> tuple[Tensor, ...]:
    """Writes T tokens into the pools, in place, and returns the given pools and scales (SSA style); under
    `plugins.registration.functional_writes` it returns new ones and leaves those given as they are.

    k, v: [T, kv_heads, head_dim], any float dtype, strided views allowed; k not yet rotated. cos, sin:
    [T, head_dim/2] float32, element i of a head pairs with i + head_dim/2. slot_mapping: [T] int32, page *
    page_size + offset, negative = the token is not written. k_pool, v_pool: [pages, page_size, kv_heads,
    head_dim] bfloat16, float32, float8_e4m3fn or int8, or uint8 with head_dim/2 for int4; rotations are computed in
    float32.

    8-bit pools store x / scale, saturated and rounded half to even. With k_scales, v_scales ([pages, page_size,
    kv_heads] float32) each token and head gets the scale max|x| / (448 for e4m3, 127 for int8), written beside
    it; without them every element is divided by the floats k_scale and v_scale. Float pools take neither. Pools of
    int4 (plugins.kv_quantization.INT4) need k_scales and v_scales, with 7 for 127; K, after RoPE, and V are rotated by
    plugins.kv_rotation first. The pools have one dtype, or one is int8 and the other int4. With `rotates_keys`, which
    is for a k_pool of int8 with k_scales, K is rotated so too; there is no functional twin of that.
    Raises RuntimeError on a wrong shape or dtype and on a slot outside the pools, before any write.
    """
    scales = () if k_scales is None or v_scales is None else (k_scales, v_scales)
    if not writes_are_functional():
        return OPERATOR.write(
            k, v, cos, sin, slot_mapping, k_pool, v_pool, k_scales, v_scales, k_scale, v_scale, rotates_keys
        )
    if rotates_keys:
        raise PluginError("rope_paged_kv_write rotates keys on CPUs alone, in place; leave rotates_keys out.")
    if scales:
        return _FUNCTIONAL_DYNAMIC(k, v, cos, sin, slot_mapping, k_pool, v_pool, *scales)
    return _FUNCTIONAL(k, v, cos, sin, slot_mapping, k_pool, v_pool, k_scale, v_scale)
