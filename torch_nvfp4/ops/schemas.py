"""Schemas of the `nvfp4` namespace: the public contract of every op, and nothing else.

Letters: T tokens, K experts per token, M = T*K routed rows, H hidden, I expert intermediate, E experts, R LoRA
rank, N / C output / contraction width of one projection, B block size, S global scales per expert (1, or 2 where
the first and the second half of the N rows have their own).

A packed weight is always three tensors in this order: `codes` uint8 `[E, N, C/2]` (low nibble = even index along
C), `scales` float8 `[E, N, C/B]` (e4m3fn: NVFP4, B = 16; e8m0fnu: MXFP4, B = 32) and `global_scale` float32
`[E, S]`, a multiplier. `rows` int32 `[M]` is a permutation of the slots (see `moe_route`); routed row m reads row
`rows[m] // top_k` of a token-side tensor, or row m itself where `rows` is None. `offsets` int32 `[E]` holds the
end row of each expert; rows from `offsets[-1]` on are not routed, and what an op leaves there is unspecified.
`input_scale` float32, 0-d, is the scale of 4-bit activations where they are not to have one a row (see `rows.py`).
"""

import torch

NAMESPACE = "nvfp4"

_WEIGHT = "Tensor codes, Tensor scales, Tensor global_scale"
_LORA = "Tensor? lora_a=None, Tensor? lora_b=None"
_NUMBERS = 'str compute="w4a16", bool merge_aware=False'
_INPUT_SCALE = "Tensor? input_scale=None"

SCHEMAS: dict[str, str] = {
    "quantize": '(Tensor x, Tensor? global_scale=None, *, str format="nvfp4")'
    " -> (Tensor codes, Tensor scales, Tensor global_scale)",
    "dequantize": f"({_WEIGHT}, *, ScalarType dtype=bfloat16) -> Tensor",
    "fake_quantize": '(Tensor x, Tensor? global_scale=None, *, str format="nvfp4") -> Tensor',
    "merge_lora": f"({_WEIGHT}, Tensor a, Tensor b, float scaling) -> (Tensor codes, Tensor scales)",
    "moe_route": "(Tensor topk_ids, int num_experts) -> (Tensor rows_M, Tensor inverse_M, Tensor offsets_E)",
    "grouped_lora_linear": f"(Tensor x, Tensor? rows, Tensor offsets, {_WEIGHT}, {_LORA}, Tensor? bias=None, *,"
    f" float scaling=1.0, int top_k=1, {_NUMBERS}, {_INPUT_SCALE}) -> (Tensor y, Tensor u)",
    "grouped_lora_dgrad": f"(Tensor gy, Tensor? rows, Tensor offsets, {_WEIGHT}, {_LORA}, Tensor? v=None, *,"
    " float scaling=1.0, int top_k=1, bool need_gx=True, bool merge_aware=False) -> (Tensor gx, Tensor v)",
    "grouped_lora_wgrad": "(Tensor p, Tensor? p_rows, Tensor q, Tensor? q_rows, Tensor offsets, *,"
    " ScalarType dtype, int top_k=1) -> Tensor",
    "glu_grouped_lora_linear": "(Tensor pre, Tensor topk_weights, Tensor rows, Tensor offsets,"
    f" {_WEIGHT}, {_LORA}, Tensor? bias=None, *,"
    f' float scaling=1.0, str activation="silu", float? limit=None, {_NUMBERS}, {_INPUT_SCALE})'
    " -> (Tensor y, Tensor u)",
    "glu_backward": "(Tensor pre, Tensor topk_weights, Tensor? gh, Tensor rows, Tensor offsets,"
    " Tensor? gy=None, Tensor? gy_rows=None, Tensor? bias=None, Tensor? lora_b=None, *,"
    ' float scaling=1.0, str activation="silu", float? limit=None,'
    " bool need_gpre=True, bool need_h=True, bool need_gw=True) -> (Tensor gpre, Tensor h, Tensor gw, Tensor v)",
    "moe_lora": "(Tensor x, Tensor topk_ids, Tensor topk_weights,"
    " Tensor gate_up_codes, Tensor gate_up_scales, Tensor gate_up_global_scale,"
    " Tensor down_codes, Tensor down_scales, Tensor down_global_scale,"
    " Tensor? gate_up_lora_a=None, Tensor? gate_up_lora_b=None,"
    " Tensor? down_lora_a=None, Tensor? down_lora_b=None,"
    " Tensor? gate_up_bias=None, Tensor? down_bias=None, *,"
    ' float gate_up_scaling=1.0, float down_scaling=1.0, str activation="silu", float? limit=None,'
    f" {_NUMBERS}, Tensor? gate_up_input_scale=None, Tensor? down_input_scale=None) -> Tensor",
}

# flexible_layout: every kernel honours strides, so Inductor need not copy inputs into exact layouts.
_LEAF_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_MACRO_TAGS = (torch.Tag.pt2_compliant_tag,)

LIBRARY = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    LIBRARY.define(_name + _schema, tags=_MACRO_TAGS if _name == "moe_lora" else _LEAF_TAGS)
