"""LoRA adapters merged into a packed checkpoint, layer by layer.

    report = merge_folder("Qwen3-30B-A3B-NVFP4", "adapter", "merged")
    print("\\n".join(report.lines()))

The new 4-bit weights are Q(W + scaling · b a) with fresh block scales on the base's global scales, to the bit what a
merge-aware forward multiplies with (`torch.ops.nvfp4.merge_lora`). With `dense` the new model is bf16.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ._lora.peft import BLayout
from ._lora.read import AdapterFile, read_for
from ._lora.sites import iter_sites
from ._lora.stamp import Stamp
from ._merge.merged import MergedCheckpoint, MergeError
from ._merge.names import Skeleton, skeleton_of, stacked_dense, stacked_of
from ._merge.report import MergeReport
from .checkpoint import Checkpoint
from .checkpoint.convert import convert_checkpoint, without_quantization
from .checkpoint.emit import Named, dense_expert_entries, stacked_expert_entries
from .checkpoint.forms import LAYOUTS
from .checkpoint.patch import write_patched
from .checkpoint.write import SHARD_BYTES, FolderWriter

__all__ = ["MergeError", "MergeReport", "Skeleton", "merge_folder", "skeleton_of"]


def merge_folder(
    source: str | os.PathLike[str], adapter: str | os.PathLike[str], out: str | os.PathLike[str], *,
    dense: bool = False, layout: str | None = None, force: bool = False,
    skeletons: Callable[[Checkpoint], Sequence[Skeleton]] | None = None, lora_b_layout: BLayout | None = None,
    device: str | torch.device = "cpu", shard_bytes: int = SHARD_BYTES, progress: Callable[[str], None] | None = None,
) -> MergeReport:  # fmt: skip
    """Write the packed checkpoint in folder `source` to `out` with the adapter in folder `adapter` merged into it.

    Args:
        dense: write a bf16 model, W + scaling · b a in fp32 and rounded once, instead of 4-bit weights. FP8 layers are
            decoded, and scales of activations and of the cache left out.
        layout: "modelopt", "compressed-tensors" or "mxfp4"; None for the source's own, which keeps all files as they
            are but for the adapted weights' bytes.
        force: merge also what was trained with other numbers: a merge-aware adapter into a dense model, or one of
            another quantiser, format or base.
        skeletons: the models whose names the adapter may have, first choice first (`torch_nvfp4.hf.skeletons`); without
            it, the checkpoint's own names.
        lora_b_layout: as for `torch_nvfp4.lora.load_adapter`.
        device: where the numbers are computed; they are the same everywhere.
        progress: called with the path of each packed module that is written.

    Adapted layers that the checkpoint has dense get W + scaling · b a, rounded once to their dtype. What is not adapted
    comes out byte for byte, and so does a block whose delta is 0.

    Raises, before anything is written, MergeError (ValueError) for an adapter whose targets the checkpoint lacks or
    whose shapes do not fit, and for what `load_adapter` refuses; CheckpointError for a checkpoint that cannot be read
    or a layout that cannot hold the result. `out` has its name only when it is whole.
    """
    checkpoint = MergedCheckpoint(Path(source), torch.device(device))
    if dense and layout is not None:
        raise MergeError("layout is that of packed weights, and a dense model has none")
    if not (checkpoint.experts or checkpoint.linears):
        raise MergeError(f"{source}: holds no packed weights; into a dense model stock PEFT merges")
    skeleton, found = _match(checkpoint, Path(adapter), skeletons, lora_b_layout)
    checkpoint.adapt(skeleton, found)
    if layout == checkpoint.layout:
        layout = None
    if layout is not None and layout not in LAYOUTS:
        raise MergeError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    differs = None if found.stamp is None else _differs(checkpoint, found.stamp, dense)
    if differs is not None and not force:
        raise MergeError(differs)
    report = MergeReport(merge_aware=found.stamp is not None and differs is None, dense=dense)
    if dense:
        _write_dense(checkpoint, skeleton, Path(out), shard_bytes, progress)
    else:
        _check_holds(checkpoint, layout)
        if layout is None:
            write_patched(
                checkpoint.folder, checkpoint.infos, Path(out), checkpoint.touched, checkpoint.patches(progress)
            )
        else:
            report.inexact = convert_checkpoint(checkpoint, Path(out), layout, False, shard_bytes, progress).inexact
    report.tensors = list(checkpoint.reports.values())
    return report


def _match(
    checkpoint: Checkpoint, adapter: Path, skeletons: Callable[[Checkpoint], Sequence[Skeleton]] | None,
    lora_b_layout: BLayout | None,
) -> tuple[Skeleton, AdapterFile]:  # fmt: skip
    """The first skeleton that the adapter fits, by names and shapes; the first one's error if there is none."""
    errors: list[ValueError] = []
    for skeleton in (*(skeletons(checkpoint) if skeletons else ()), skeleton_of(checkpoint)):
        try:
            found = read_for(adapter, list(iter_sites(skeleton.model)), lora_b_layout)
            found.values()
            return skeleton, found
        except ValueError as error:
            errors.append(error)
    said = str(errors[0])  # which has the folder's name already where a file of it is missing or damaged
    raise MergeError(said if str(adapter) in said else f"{adapter}: {said}") from errors[0]


def _differs(checkpoint: MergedCheckpoint, stamp: Stamp, dense: bool) -> str | None:
    """In words, in what the adapter was trained with other numbers than those that would be written."""
    if dense:
        return (
            "the adapter was trained merge-aware, for its sum with the weights rounded to 4 bits; in a dense model it "
            "is another, which may be worse. Merge it without --dense, or with --force all the same"
        )
    for path in checkpoint.adapted:
        entry = checkpoint.experts.get(path) or checkpoint.linears[path]
        if reason := stamp.mismatch(entry.format):
            return f"{path}: the adapter is merge-aware, and {reason}; --force merges it all the same"
    if stamp.base is not None and checkpoint.adapted and stamp.base != checkpoint.fingerprint():
        return (
            f"the adapter was trained merge-aware on other 4-bit weights than those of {checkpoint.folder}, whose "
            "rounding it fits; --force merges it all the same"
        )
    return None


def _check_holds(checkpoint: MergedCheckpoint, layout: str | None) -> None:
    """MergeError for weights that the layout keeps in fewer numbers than the result has."""
    for name in checkpoint.adapted_fp8:
        raise MergeError(
            f"{name.removesuffix('.weight')}: the checkpoint has this layer in FP8, which is not merged into; a dense "
            "model holds the result (--dense)"
        )
    for path in checkpoint.adapted if layout is None else ():
        if (repeat := checkpoint.form(path).repeat) != 1:
            other = "compressed-tensors" if checkpoint.layout == "modelopt" else "modelopt"
            raise MergeError(
                f"{path}: the checkpoint has one scale for {repeat} blocks, merging gives each its own: "
                f"--layout {other} holds the result"
            )


def _write_dense(
    checkpoint: MergedCheckpoint, skeleton: Skeleton, out: Path, shard_bytes: int,
    progress: Callable[[str], None] | None,
) -> None:  # fmt: skip
    with FolderWriter(out, shard_bytes) as writer:
        for name, tensor in _dense_tensors(checkpoint, skeleton, progress):
            writer.add(name, tensor)
        config = without_quantization(checkpoint.config)
        writer.finish({"config.json": config}, checkpoint.folder)


def _dense_tensors(checkpoint: MergedCheckpoint, skeleton: Skeleton, progress: Callable[[str], None] | None) -> Named:
    """Every tensor of the dense model, in the order of the packed one."""
    of_fp8 = {name for entry in checkpoint.fp8.values() for name in entry.tensors if name != entry.weight}
    for name, packed in checkpoint.walk(progress):
        if not packed:
            if name in checkpoint.fp8 or not (name in of_fp8 or checkpoint.is_scale(name)):
                yield name, checkpoint.load_plain(name)
        elif name in checkpoint.experts:
            yield from _dense_experts(checkpoint, skeleton, name)
        else:
            yield f"{name}.weight", checkpoint.dense_linear(name)


def _dense_experts(checkpoint: MergedCheckpoint, skeleton: Skeleton, path: str) -> Named:
    """A layer's experts as the dense model's files have them, which only its framework knows for sure."""
    pieces, module = checkpoint.dense_experts(path), skeleton.module_of(path)
    if skeleton.rename is not None and module is not None:
        stock = stacked_expert_entries(module, stacked_of(skeleton.model.get_submodule(module)), pieces)
        yield from skeleton.rename(dict(stock)).items()
    elif (stacked := stacked_dense(checkpoint)) is not None:
        yield from stacked_expert_entries(path, stacked, pieces)
    else:
        yield from dense_expert_entries(path, checkpoint.form(path).roles, pieces)
