"""Which weight of a checkpoint an adapter's name means."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from .._lora.sites import StockLayout, stock_layout_of
from ..checkpoint import Checkpoint
from ..checkpoint.emit import Stacked
from ..checkpoint.layouts import FLOATS
from ..checkpoint.stacks import INTERLEAVED, model_types
from ..nn import NVFP4Experts, NVFP4Linear


@dataclass(frozen=True)
class Skeleton:
    """A model without weights, which adapters are read for.

    model: modules on the meta device; those packed in the checkpoint are `NVFP4Experts` and `NVFP4Linear`.
    sources: path of a module in the model -> path in the checkpoint.
    rename: the model's tensors -> what they are in the files of the dense model; None where the checkpoint tells.
    """

    model: nn.Module
    sources: Mapping[str, str]
    rename: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None

    def module_of(self, path: str) -> str | None:
        """The path in the model of a path in the checkpoint."""
        return next((module for module, source in self.sources.items() if source == path), None)


def skeleton_of(checkpoint: Checkpoint) -> Skeleton:
    """The model whose names are the checkpoint's own, as they are for most architectures.

    An adapter of a model whose modules are called otherwise needs that model's skeleton (`torch_nvfp4.hf.skeletons`).
    """
    root = nn.Module()
    for path, entry in checkpoint.experts.items():
        experts = NVFP4Experts(
            entry.num_experts, entry.hidden, entry.intermediate, activation="silu" if entry.gated else "relu2",
            format=entry.format, device="meta",
        )  # fmt: skip
        experts.__dict__["stock_layout"] = _stock_layout(checkpoint, entry.gated)
        _put(root, path, experts)
    for path, linear in checkpoint.linears.items():
        _put(root, path, NVFP4Linear(linear.in_features, linear.out_features, format=linear.format, device="meta"))
    for path, (n, c) in dense_layers(checkpoint).items():
        _put(root, path, nn.Linear(c, n, bias=False, device="meta"))
    return Skeleton(root, {path: path for path, _ in root.named_modules() if path})


def dense_layers(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """Path -> (N, C) of matrices that are not packed to 4 bits; FP8 ones among them."""
    names = [name for name in checkpoint.plain if checkpoint.dtype(name) in FLOATS] + list(checkpoint.fp8)
    shapes = {name.removesuffix(".weight"): checkpoint.shape(name) for name in names if name.endswith(".weight")}
    return {path: (shape[0], shape[1]) for path, shape in shapes.items() if len(shape) == 2}


def stacked_dense(checkpoint: Checkpoint) -> Stacked | None:
    """How the dense model's files keep experts, by its model_type; None where one by one."""
    kinds = (kind for kind in model_types(checkpoint.config) if isinstance(kind, str))
    interleaved = next((INTERLEAVED[kind] for kind in kinds if kind in INTERLEAVED), None)
    return None if interleaved is None else Stacked(transposed=True, interleaved=interleaved)


def stacked_of(experts: nn.Module) -> Stacked:
    """How the stock module of packed experts keeps them."""
    layout = stock_layout_of(experts)
    return Stacked(layout.gate_up_name, layout.down_name, layout.transposed, layout.interleaved)


def _stock_layout(checkpoint: Checkpoint, gated: bool) -> StockLayout:
    stacked = stacked_dense(checkpoint)
    if stacked is None or not gated:
        return StockLayout(gate_up_name="gate_up_proj" if gated else "up_proj")
    return StockLayout(transposed=True, interleaved=stacked.interleaved, untold=not stacked.interleaved)


def _put(root: nn.Module, path: str, module: nn.Module) -> None:
    *parents, leaf = path.split(".")
    for name in parents:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    if leaf in root._modules:  # a matrix under which others lie: they came first
        for name, child in root.get_submodule(leaf).named_children():
            module.add_module(name, child)
    root.add_module(leaf, module)
