"""One gate that every op of the namespace passes, on the samples of samples.py; an op without samples fails it.

A row that an op leaves unspecified (from `offsets[-1]` on) is left out of comparisons, and memory is poisoned where
that would show.
"""

# ruff: noqa: E501  (lines of journals are as long as the schemas are)

import warnings
from collections.abc import Callable

import expecttest
import pytest
import torch
from samples import MAKERS, Sample, T, assert_same_bits, loss, samples
from strategies import strided
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from torch_nvfp4.ops.schemas import NAMESPACE, SCHEMAS

ALL = samples()
every_op = pytest.mark.parametrize("sample", ALL, ids=str)


# ---- the set of ops


class TestSchemas(expecttest.TestCase):
    def test_list(self) -> None:
        registered = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith(f"{NAMESPACE}::")]
        text = "\n".join(sorted(str(schema) for schema in registered)) + "\n"
        self.assertExpectedInline(
            text,
            """\
nvfp4::dequantize(Tensor codes, Tensor scales, Tensor global_scale, *, ScalarType dtype=15) -> Tensor
nvfp4::fake_quantize(Tensor x, Tensor? global_scale=None, *, str format="nvfp4") -> Tensor
nvfp4::glu_backward(Tensor pre, Tensor topk_weights, Tensor? gh, Tensor rows, Tensor offsets, Tensor? gy=None, Tensor? gy_rows=None, Tensor? bias=None, Tensor? lora_b=None, *, float scaling=1., str activation="silu", float? limit=None, bool need_gpre=True, bool need_h=True, bool need_gw=True) -> (Tensor gpre, Tensor h, Tensor gw, Tensor v)
nvfp4::glu_grouped_lora_linear(Tensor pre, Tensor topk_weights, Tensor rows, Tensor offsets, Tensor codes, Tensor scales, Tensor global_scale, Tensor? lora_a=None, Tensor? lora_b=None, Tensor? bias=None, *, float scaling=1., str activation="silu", float? limit=None, str compute="w4a16", bool merge_aware=False, Tensor? input_scale=None) -> (Tensor y, Tensor u)
nvfp4::grouped_lora_dgrad(Tensor gy, Tensor? rows, Tensor offsets, Tensor codes, Tensor scales, Tensor global_scale, Tensor? lora_a=None, Tensor? lora_b=None, Tensor? v=None, *, float scaling=1., int top_k=1, bool need_gx=True, bool merge_aware=False) -> (Tensor gx, Tensor v)
nvfp4::grouped_lora_linear(Tensor x, Tensor? rows, Tensor offsets, Tensor codes, Tensor scales, Tensor global_scale, Tensor? lora_a=None, Tensor? lora_b=None, Tensor? bias=None, *, float scaling=1., int top_k=1, str compute="w4a16", bool merge_aware=False, Tensor? input_scale=None) -> (Tensor y, Tensor u)
nvfp4::grouped_lora_wgrad(Tensor p, Tensor? p_rows, Tensor q, Tensor? q_rows, Tensor offsets, *, ScalarType dtype, int top_k=1) -> Tensor
nvfp4::merge_lora(Tensor codes, Tensor scales, Tensor global_scale, Tensor a, Tensor b, float scaling) -> (Tensor codes, Tensor scales)
nvfp4::moe_lora(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor gate_up_codes, Tensor gate_up_scales, Tensor gate_up_global_scale, Tensor down_codes, Tensor down_scales, Tensor down_global_scale, Tensor? gate_up_lora_a=None, Tensor? gate_up_lora_b=None, Tensor? down_lora_a=None, Tensor? down_lora_b=None, Tensor? gate_up_bias=None, Tensor? down_bias=None, *, float gate_up_scaling=1., float down_scaling=1., str activation="silu", float? limit=None, str compute="w4a16", bool merge_aware=False, Tensor? gate_up_input_scale=None, Tensor? down_input_scale=None) -> Tensor
nvfp4::moe_route(Tensor topk_ids, int num_experts) -> (Tensor rows_M, Tensor inverse_M, Tensor offsets_E)
nvfp4::quantize(Tensor x, Tensor? global_scale=None, *, str format="nvfp4") -> (Tensor codes, Tensor scales, Tensor global_scale)
""",
        )


def test_every_op_has_samples() -> None:
    registered = {s.name.split("::")[1] for s in torch._C._jit_get_all_schemas() if s.name.startswith(f"{NAMESPACE}::")}
    assert registered == set(SCHEMAS) == set(MAKERS) == {sample.op for sample in ALL}


@every_op
def test_schema_claims_neither_mutation_nor_aliasing(sample: Sample) -> None:
    assert sample.overload._schema.is_mutable is False
    for argument in (*sample.overload._schema.arguments, *sample.overload._schema.returns):
        assert argument.alias_info is None


# ---- torch.library.opcheck


@pytest.fixture(scope="module")
def bytes_library() -> torch.library.Library:
    """`nvfp4_bytes::op`, the same ops with their float8 arguments and results as uint8."""
    library = torch.library.Library("nvfp4_bytes", "DEF")
    for op, schema in SCHEMAS.items():
        library.define(op + schema, tags=torch.Tag.pt2_compliant_tag)
    return library


@pytest.mark.parametrize("sample", samples(pattern="distinct"), ids=str)
def test_opcheck_fault_d14(sample: Sample, bytes_library: torch.library.Library) -> None:
    args, kwargs = sample.leaves().split()
    utils = ["test_autograd_registration", "test_faketensor"]
    if sample.name == next(s.name for s in ALL if s.op == sample.op):  # slow, and test_gate_compile.py does more
        utils.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(sample.overload, args, kwargs, test_utils=utils)
    # test_schema compares arguments before and after by torch.allclose, which float8 has not: it sees them as bytes.
    overload = getattr(torch.ops.nvfp4_bytes, sample.op).default
    dtypes = {name: t.dtype for name, t in sample.tensors.items() if t.element_size() == 1 and t.is_floating_point()}
    args, kwargs = sample.map(lambda t: t.view(torch.uint8) if t.dtype in dtypes.values() else t).split()
    names = [argument.name for argument in overload._schema.arguments]

    def run(*args: object, **kwargs: object) -> object:
        args = tuple(a.view(dtypes[n]) if n in dtypes else a for n, a in zip(names, args, strict=False))
        results = sample.overload(*args, **kwargs)
        return tree_map_only(Tensor, lambda t: t.view(torch.uint8) if "float8" in str(t.dtype) else t, results)

    with torch.library._scoped_library("nvfp4_bytes", "IMPL") as implementation:
        implementation.impl(sample.op, run, "CompositeExplicitAutograd")
        torch.library.opcheck(overload, args, kwargs, test_utils="test_schema")


# ---- layout


@pytest.mark.parametrize("how", ["contiguous", "sliced", "transposed"])
@every_op
def test_fake_layout_is_the_real_one_fault_d1_d2_b19(sample: Sample, how: str) -> None:
    sample = sample.map(lambda t: strided(t, how))
    real = sample.run()
    with FakeTensorMode() as mode:
        fake = sample.map(mode.from_tensor).run()
    for f, r in zip(fake, real, strict=True):
        assert (f.shape, f.stride(), f.dtype, f.device) == (r.shape, r.stride(), r.dtype, r.device)
        assert r.is_contiguous()


@pytest.mark.parametrize("how", ["sliced", "transposed"])
@every_op
def test_strides_of_arguments_do_not_matter_fault_a8_a10_e11(sample: Sample, how: str) -> None:
    sides = [s.defined(s.run()) for s in (sample, sample.map(lambda t: strided(t, how)))]
    for got, wanted in zip(*sides, strict=True):
        if got.dtype.is_floating_point and got.element_size() > 1:  # a matrix product may sum in another order
            assert (got - wanted).norm() <= 4 * torch.finfo(got.dtype).eps * wanted.norm()
        else:
            assert_same_bits([got], [wanted])


@pytest.mark.parametrize("tokens", [0, 1, T])
@pytest.mark.parametrize("op", MAKERS)
def test_results_share_no_memory_with_arguments_or_each_other_fault_d4(op: str, tokens: int) -> None:
    for sample in samples(tokens, ops=[op]):
        owners = [t.untyped_storage()._cdata for t in (*sample.tensors.values(), *sample.run())]
        assert len(set(owners)) >= len(owners) - repeated(sample), sample


def repeated(sample: Sample) -> int:
    """How many arguments are the same tensor as another (rows and gy_rows of a sample)."""
    return len(sample.tensors) - len({id(t) for t in sample.tensors.values()})


@every_op
def test_arguments_are_not_written(sample: Sample) -> None:
    before = {name: t.clone() for name, t in sample.tensors.items()}
    leaves = sample.leaves()
    results = leaves.run()
    if sample.differentiable:
        loss(sample, results).backward()
    assert_same_bits(sample.tensors.values(), before.values())


# ---- numbers that must not depend on how an op is called


@every_op
def test_repeats_give_the_same_bits_fault_b16(sample: Sample) -> None:
    first = sample.defined(sample.run())
    for _ in range(3):
        assert_same_bits(sample.defined(sample.run()), first)


@pytest.mark.parametrize("sample", [s for s in ALL if "topk_ids" in s.arguments], ids=str)
def test_id_dtype_does_not_matter(sample: Sample) -> None:
    ids = sample.arguments["topk_ids"]
    wanted = sample.run()
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8):
        assert_same_bits(sample.replaced({"topk_ids": ids.to(dtype)}).run(), wanted)


@every_op
def test_inference_mode_and_no_grad(sample: Sample) -> None:
    wanted = sample.defined(sample.run())
    leaves = sample.leaves()
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode:
            results = leaves.run()
        assert not any(r.requires_grad for r in results)
        assert_same_bits(sample.defined(results), wanted)


@every_op
def test_what_is_not_routed_is_not_read_fault_a5_b7(sample: Sample, poison: Callable[[], None]) -> None:
    results = sample.defined(sample.run())
    assert all(r.float().isfinite().all() for r in results)
    assert_same_bits(sample.defined(sample.with_nan_where_not_routed().run()), results)


@every_op
def test_vmap_is_right(sample: Sample) -> None:
    name = next(n for n, t in sample.tensors.items() if t.is_floating_point() or n in ("topk_ids", "codes"))
    stacked = torch.stack([sample.arguments[name], sample.arguments[name].flip(0)])

    def run(tensor: Tensor) -> tuple[Tensor, ...]:
        return sample.replaced({name: tensor}).run()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        got = torch.vmap(run)(stacked)
    for at in range(2):
        assert_same_bits(sample.defined(tuple(g[at] for g in got)), sample.defined(run(stacked[at])))
