"""The main job: load, quantise, train adapters, save. Each part is in a file of its own beside this one."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torch_nvfp4 import hf, lora
from torch_nvfp4._lora.sites import adapted_sites
from torch_nvfp4._lora.stamp import packed_modules
from torch_nvfp4.distributed import average_gradients, clip_gradients
from torch_nvfp4.nn import NVFP4Experts, NVFP4Linear, set_numerics
from torch_nvfp4.train import compilers, config_file, memory, report, state
from torch_nvfp4.train.config import FinetuneConfig, FinetuneError, Interrupted, one_line
from torch_nvfp4.train.data import TokenData, eval_batches, load_data, train_batch
from torch_nvfp4.train.device import choose_device, inspect_machine
from torch_nvfp4.train.model import load_description, load_model, weights_digest
from torch_nvfp4.train.needs import check_needs
from torch_nvfp4.train.packing import check_separation
from torch_nvfp4.train.plot import write_plot
from torch_nvfp4.train.ranks import ALONE, Ranks, joined
from torch_nvfp4.train.report import FinetuneResult
from torch_nvfp4.train.schedule import learning_rate
from torch_nvfp4.train.sharded import check_experts, layout, load_sharded
from torch_nvfp4.train.signals import StopRequest
from torch_nvfp4.train.step import LossStep, mean_loss, targets_in


@dataclass
class _Run:
    """What the stages of one run share."""

    config: FinetuneConfig
    console: Console
    device: str
    data: TokenData
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: LossStep
    progress: state.Progress
    fingerprint: dict[str, Any]
    plan: memory.MemoryPlan
    path: str
    ranks: Ranks = ALONE
    seconds: float = 0.0
    tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def finetune(config: FinetuneConfig, *, console: Console | None = None) -> FinetuneResult:
    """Quantise a model's experts to NVFP4, train LoRA adapters on it and save them into `config.output`.

    Args:
        config: what to train and how.
        console: where to show it; standard output if not given.

    Raises:
        FinetuneError: wrong input, in one line that says how to mend it.
        Interrupted: Ctrl-C or SIGTERM while training; the state is saved.
    """
    config.validate()
    check_needs(config)
    device, device_note = choose_device(config.device, inspect_machine())
    with joined(config, device) as ranks, compilers.symbolic_sizes(config):
        console = (console or Console()) if ranks.is_first else Console(quiet=True)
        run = _prepare(config, console, device, device_note, ranks)
        _train(run)
        return _finish(run)


def _prepare(config: FinetuneConfig, console: Console, device: str, device_note: str, ranks: Ranks) -> _Run:
    """Everything before the first step; what a user can get wrong is found before the weights are read."""
    checkpoint = ranks.of_first(lambda: state.prepare_output(config))
    if checkpoint:
        state.check_fingerprint(checkpoint, config.fingerprint())
    compile, compile_note = compilers.choose(config.compile, device)
    for note in filter(None, (device_note, compile_note)):
        console.print(note, highlight=False)
    description, tokenizer = load_description(config)
    check_experts(config, description)
    data = load_data(config, tokenizer, description.get_text_config().vocab_size)
    console.print(
        f"text: {len(data.train_WS):,} sequences of {config.seq_len} tokens to train on, "
        f"{data.eval_tokens:,} tokens held out"
    )
    if data.note:
        console.print(data.note, highlight=False, soft_wrap=True)

    memory.reset_peak(device)
    if ranks.mesh is not None:
        return _prepare_sharded(config, console, device, ranks, description, data, checkpoint, compile)
    model = load_model(config, device)
    fingerprint = config.fingerprint() | {"model": weights_digest(model), "text": data.text_hash}
    if checkpoint:
        state.check_fingerprint(checkpoint, fingerprint)
    if data.packed:
        check_separation(model, config.model, config.batch, device)
    dense_bytes, was_packed = memory.dense_bytes(model), bool(memory.expert_bytes(model))
    progress = _quantize(config, console, model, data, device, measure=checkpoint is None)

    torch.manual_seed(config.seed)
    summary = _add_adapters(config, model)
    console.print(summary, highlight=False)
    plan = memory.plan(model, config, dense_bytes, device, compile)
    report.print_plan(console, plan, config.optim, device)
    if config.gradient_checkpointing:
        _checkpoint_layers(model)
    optimizer = _optimizer(config, model)
    _check_merge_aware(config, model, packed_here=not was_packed, console=console)
    _set_merge_aware(config, model, state.step_of(checkpoint) if checkpoint else 0)
    if checkpoint:
        progress = state.load_checkpoint(checkpoint, model, optimizer)
        console.print(f"resumed from {checkpoint}: {progress.step} of {config.steps} steps are done", soft_wrap=True)
    step, path = _compile(config, console, model, data, device, compile and progress.step < config.steps)
    return _Run(config, console, device, data, model, optimizer, step, progress, fingerprint, plan, path)


def _prepare_sharded(
    config: FinetuneConfig, console: Console, device: str, ranks: Ranks, description: Any, data: TokenData,
    checkpoint: Path | None, compile: bool,
) -> _Run:  # fmt: skip
    """As `_prepare` from the weights on, for a model that several processes share."""

    def adapt(model: nn.Module) -> None:
        console.print(_add_adapters(config, model), highlight=False)
        if config.gradient_checkpointing:
            _checkpoint_layers(model)

    if compile and config.compile == "auto":  # it may fail on one rank, whom the others would wait for; not measured
        compile = False
        console.print("several processes run eager; --compile on compiles layer by layer", highlight=False)
    loaded = load_sharded(config, description, ranks, device, adapt)
    model: Any = loaded.model
    fingerprint = config.fingerprint() | {"model": loaded.digest, "text": data.text_hash}
    if checkpoint:
        state.check_fingerprint(checkpoint, fingerprint)
    if data.packed:
        if config.fsdp:
            model.unshard()  # the check reads the embeddings by themselves
        check_separation(model, config.model, config.batch, device)
        if config.fsdp:
            model.reshard()
    plan = memory.plan(model, config, loaded.dense_bytes, device, compile)
    console.print(layout(config, ranks.count), highlight=False)
    report.print_plan(console, plan, config.optim, device)
    optimizer, progress = _optimizer(config, model), state.Progress()
    _check_merge_aware(config, model, packed_here=not loaded.was_packed, console=console)
    if checkpoint is None:  # adapters begin as no-ops
        progress.base_loss = progress.quantized_loss = mean_loss(
            model, eval_batches(data, config.batch), device, ranks=ranks
        )
        console.print(f"held-out loss with packed experts: {progress.base_loss:.4f}")
    _set_merge_aware(config, model, state.step_of(checkpoint) if checkpoint else 0)
    if checkpoint:
        progress = state.load_checkpoint(checkpoint, model, optimizer, ranks)
        console.print(f"resumed from {checkpoint}: {progress.step} of {config.steps} steps are done", soft_wrap=True)
    if compile:
        for name in loaded.layers:
            model.get_submodule(name).compile(dynamic=False)
    path = f"{compilers.compiled_path(device)}, layer by layer" if compile else "eager"
    step = LossStep(model, False)
    return _Run(config, console, device, data, model, optimizer, step, progress, fingerprint, plan, path, ranks)


def _quantize(
    config: FinetuneConfig, console: Console, model: nn.Module, data: TokenData, device: str, *, measure: bool
) -> state.Progress:
    """Quantise the experts in place; `measure` the held-out loss before and after. Packed ones stay as they are."""
    batches = eval_batches(data, config.batch)
    progress = state.Progress()
    if memory.expert_bytes(model):
        if measure:
            progress.base_loss = progress.quantized_loss = mean_loss(model, batches, device)
            console.print(f"held-out loss of the base, whose experts are packed: {progress.base_loss:.4f}")
        return progress
    if measure:
        progress.base_loss = mean_loss(model, batches, device)
        console.print(f"held-out loss of the base: {progress.base_loss:.4f}")
    try:
        hf.quantize_experts(model, config.format)
    except ValueError as e:
        raise FinetuneError(f"{config.model}: the experts cannot be quantised: {one_line(e)}") from e
    if not memory.expert_bytes(model):
        raise FinetuneError(f"{config.model} has no mixture-of-experts layers: give a model that has")
    if measure:
        progress.quantized_loss = mean_loss(model, batches, device)
        console.print(f"held-out loss with quantised experts: {progress.quantized_loss:.4f}")
    return progress


def _add_adapters(config: FinetuneConfig, model: nn.Module) -> str:
    try:
        return str(
            lora.add_lora(
                model,
                r=config.rank,
                alpha=config.alpha,
                expert_r=config.expert_rank,
                rslora=config.rslora,
                targets=config.targets,
                dtype=getattr(torch, config.lora_dtype),
            )
        )
    except ValueError as e:
        raise FinetuneError(f"--targets {','.join(config.targets)}: {one_line(e)}") from e


def _check_merge_aware(config: FinetuneConfig, model: nn.Module, *, packed_here: bool, console: Console) -> None:
    """Say what --merge-aware does; FinetuneError where no adapter is on packed weights."""
    if config.merge_aware_from is None:
        return
    if not any(isinstance(site.module, NVFP4Experts | NVFP4Linear) for site in adapted_sites(model)):
        raise FinetuneError("--merge-aware: no adapter is on packed weights, name some in --targets (experts)")
    start = f"from step {config.merge_aware_from + 1} on" if config.merge_aware_from else "from the start"
    console.print(f"merge-aware {start}: the forward uses the 4-bit weights that torch-nvfp4 merge writes")
    if packed_here:
        console.print(
            f"to merge, make the base that was quantised here: torch-nvfp4 quantize {config.model} OUT "
            f"--no-share-gate-up{'' if config.format == 'nvfp4' else f' --format {config.format}'}",
            soft_wrap=True,
        )


def _set_merge_aware(config: FinetuneConfig, model: nn.Module, step: int) -> bool:
    """Make the model merge-aware if it is to be for the step after `step`; whether that changed anything."""
    start = config.merge_aware_from
    wanted = start is not None and step >= start
    changed = wanted and not all(m.merge_aware for m in packed_modules(model.modules()))
    if changed:
        set_numerics(model, merge_aware=True)
    return changed


def _checkpoint_layers(model: Any) -> None:
    """Have every layer keep its input alone and compute the rest again in backward."""
    # the second is the older name of the first
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    # Only reentrant checkpointing needs embeddings that require grad; under torch.compile they are an error.
    model.disable_input_require_grads()


def _optimizer(config: FinetuneConfig, model: nn.Module) -> torch.optim.Optimizer:
    on_mesh: dict[Any, list[nn.Parameter]] = {}  # sharded experts and the rest are on two, and never one kernel's
    for parameter in state.trainable(model).values():
        on_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    parameters = [{"params": params} for params in on_mesh.values()]
    if config.optim == "sgd":
        way = {"foreach": True} if config.fsdp else {"fused": True}  # DTensor has no rule for the fused one
        return torch.optim.SGD(parameters, lr=config.lr, momentum=0.9, weight_decay=config.weight_decay, **way)
    return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True)


def _compile(
    config: FinetuneConfig, console: Console, model: nn.Module, data: TokenData, device: str, compile: bool
) -> tuple[LossStep, str]:
    """The training step, compiled and tried out if asked for, and the name of what runs."""
    step = LossStep(model, compile)
    if compile:
        start = time.perf_counter()
        console.print("compiling the training step")
        note = step.warm_up(train_batch(data, config, 0, 0), device, config.compile)
        console.print(note or f"compiled in {time.perf_counter() - start:.0f} s", highlight=False, soft_wrap=True)
    return step, compilers.compiled_path(device) if step.compiled else "eager"


def _train(run: _Run) -> None:
    config, progress = run.config, run.progress
    with (
        StopRequest() as stop,
        report.TrainingDisplay(run.console, run.device, progress.step, config.steps) as display,
    ):
        while progress.step < config.steps:
            if _set_merge_aware(config, run.model, progress.step):
                _recompile(run)
            loss = _optimizer_step(run)
            progress.step += 1
            progress.train_losses.append((progress.step, loss))
            display.step(progress.step, loss, run.tokens_per_second)
            last, signum = progress.step == config.steps, run.ranks.signal(stop.signum)
            if not last and _due(progress.step, config.eval_every) and not signum:
                batches = eval_batches(run.data, config.batch)
                held_out = mean_loss(run.model, batches, run.device, run.step.compiled, run.ranks)
                progress.eval_losses.append((progress.step, held_out))
                display.evaluation(progress.step, held_out)
            if last or _due(progress.step, config.save_every) or signum:
                state.save_checkpoint(config, run.model, run.optimizer, progress, run.fingerprint, run.ranks)
                # after a checkpoint, not before: a folder that holds other things alone is refused
                if run.ranks.is_first:
                    config_file.write(config, config.output / config_file.FILE_NAME)
            if signum:
                raise Interrupted(
                    signum,
                    f"stopped after step {progress.step} of {config.steps}, saved: the same command goes on from there",
                )


def _recompile(run: _Run) -> None:
    """The step is merge-aware from now on; its new graph is compiled outside the steps' time."""
    run.console.print(f"merge-aware from step {run.progress.step + 1} on")
    if run.step.compiled:
        batch = train_batch(run.data, run.config, run.progress.step, 0)
        if note := run.step.warm_up(batch, run.device, run.config.compile):
            run.console.print(note, highlight=False, soft_wrap=True)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _optimizer_step(run: _Run) -> float:
    """One step over `grad_accum` micro-batches; returns its mean loss, or FinetuneError if not finite."""
    config, number = run.config, run.progress.step
    start = time.perf_counter()
    tokens = config.grad_accum * config.batch * config.seq_len
    batches = [train_batch(run.data, config, number, micro) for micro in range(config.grad_accum)]
    learnt = sum(map(targets_in, batches))  # of all micro-batches: each has its own share of what is learnt
    total, mine = 0.0, run.ranks.mine(batches)
    for micro, batch in enumerate(mine):
        if isinstance(run.model, FSDPModule):
            run.model.set_requires_gradient_sync(micro == len(mine) - 1)
        loss = run.step(*(tensor.to(run.device) for tensor in batch)) / learnt
        (loss * run.ranks.count).backward()  # the mean that is taken over the ranks is then their sum
        total += loss.item()
    (total,) = run.ranks.total(total)
    if not math.isfinite(total):
        raise FinetuneError(f"the loss is {total} at step {number + 1}: lower --lr, or raise --warmup")
    if run.ranks.splits_experts and not config.fsdp:
        average_gradients(run.model, run.ranks.mesh)
    if config.clip and run.ranks.splits_experts:
        clip_gradients(run.model, config.clip)
    elif config.clip:
        nn.utils.clip_grad_norm_(state.trainable(run.model).values(), config.clip)
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(number, config.lr, config.warmup, config.steps)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    run.seconds += time.perf_counter() - start
    run.tokens += tokens
    return total


def _finish(run: _Run) -> FinetuneResult:
    """Last evaluation, adapter, plot and summary."""
    config, progress = run.config, run.progress
    batches = eval_batches(run.data, config.batch)
    final_loss = mean_loss(run.model, batches, run.device, ranks=run.ranks)
    with lora.disable_adapters(run.model, "experts"):
        zeroed_loss = mean_loss(run.model, batches, run.device, ranks=run.ranks)
    unmerged_loss = None
    if config.merge_aware:
        set_numerics(run.model, merge_aware=False)
        unmerged_loss = mean_loss(run.model, batches, run.device, ranks=run.ranks)
        set_numerics(run.model, merge_aware=True)
    progress.eval_losses.append((progress.step, final_loss))
    state.save_adapter(config, run.model, config.output, run.ranks)
    plot_path = config.output / "loss.png" if config.plot else None
    if plot_path and run.ranks.is_first:
        write_plot(progress, plot_path)
    result = FinetuneResult(
        base_loss=progress.base_loss,
        quantized_loss=progress.quantized_loss,
        final_loss=final_loss,
        expert_adapters_zeroed_loss=zeroed_loss,
        steps=progress.step,
        tokens_per_second=run.tokens_per_second,
        peak_memory_bytes=memory.peak_bytes(run.device),
        predicted_peak_bytes=run.plan.peak,
        path=run.path,
        experts_bytes_before=run.plan.dense_experts,
        experts_bytes_after=run.plan.packed_experts,
        adapter_dir=config.output,
        plot_path=plot_path,
        loss_history=tuple(progress.train_losses),
        eval_history=tuple(progress.eval_losses),
        unmerged_loss=unmerged_loss,
    )
    report.print_summary(run.console, result)
    return result
