"""Devices without kernels: a refusal of one line in words, from properties that are faked here."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_nvfp4.ops import cuda


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Kernels that say their name, on a card that a test describes."""
    monkeypatch.setattr(cuda, "cuda_kernel", lambda op: lambda *args: op)
    cuda.unsupported.cache_clear()
    yield monkeypatch
    cuda.unsupported.cache_clear()


def card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


def call(otherwise: Callable[..., Any] | None = None) -> Any:
    tensor = SimpleNamespace(device=torch.device("cuda", 0))
    return cuda.launcher("grouped_lora_linear", otherwise)(tensor)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)], ids=str)
def test_cards_from_sm_80_on_run_the_kernel(enabled: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    card(enabled, capability, "a card")
    assert call() == "grouped_lora_linear"


def refused() -> str:
    with pytest.raises(NotImplementedError) as raised:
        call()
    assert call(lambda tensor: "plain torch") == "plain torch"
    return str(raised.value)


def test_an_older_card_is_refused(enabled: pytest.MonkeyPatch) -> None:
    card(enabled, (7, 5), "T4")
    assert refused() == (
        "nvfp4::grouped_lora_linear: the kernels need sm_80 (Ampere) or later, and T4 is sm_75; it runs on the CPU"
    )


def test_rocm_is_refused(enabled: pytest.MonkeyPatch) -> None:
    card(enabled, (9, 4), "MI300X")  # which ROCm reports like a capability
    enabled.setattr(torch.version, "hip", "6.4")
    assert refused() == (
        "nvfp4::grouped_lora_linear: the kernels are written for NVIDIA GPUs and do not run on ROCm; it runs on the CPU"
    )


@pytest.mark.parametrize("op", ["moe_route", "grouped_lora_linear", "quantize"])
@pytest.mark.parametrize("device", ["MPS", "XPU"])
def test_other_devices_are_refused(op: str, device: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"nvfp4::{op}", device)
    with pytest.raises(NotImplementedError) as raised:
        cuda.refusal(op, device)()
    assert str(raised.value) == (f"nvfp4::{op}: there is no kernel for {device}; it runs on the CPU and on NVIDIA GPUs")
