"""Building CUDA kernels without a GPU: the targets they ship for, and a kernel compiled for one of them."""

import re
import subprocess
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

KIB = 1024
SHARED_MEMORY = {
    80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 103: 227 * KIB, 120: 99 * KIB,
    121: 99 * KIB,
}  # fmt: skip
"""Bytes that a program may use, by sm number: data centre cards, and consumer cards with 99 KiB."""
POINTERS = dict(
    codes="*u8", scales="*u8", global_scale="*fp32", lora_a="*fp32", lora_b="*fp32", factor="*fp32", bias="*fp32",
    offsets="*i32", slots="*i32", gy_slots="*i32", narrow_slots="*i32", wide_slots="*i32", slot_weights="*fp32",
    rows="*i32", inverse="*i32", counts="*i32", ids="*i64", gw="*fp32", scaling="fp32", partial="*i32",
    row_scale="*fp32", moved_scale="*fp32", input_scale="*fp32",
)  # fmt: skip
ACTIVATIONS = ("x", "gy", "u", "v", "y", "gx", "pre", "gpre", "gh", "h", "out", "narrow", "wide")
POINTER_TO = {tl.bfloat16: "*bf16", tl.float16: "*fp16", tl.float32: "*fp32"}


def family(arch: int) -> int:
    """The major number, which is what a choice of instructions may depend on."""
    return arch // 10


def build(
    kernel: Any, arch: int, constants: dict[str, Any], types: dict[str, str], warps: int = 4, *, float8: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    """The kernel compiled for sm_`arch` as a launch with 16-byte aligned tensors and sizes would compile it."""
    names = kernel.arg_names
    constants = {name: value for name, value in _with_pdl(constants, arch).items() if name in names}
    activation = POINTER_TO[constants.get("DTYPE", tl.bfloat16)]
    known = dict.fromkeys(ACTIVATIONS, activation) | POINTERS | types
    signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in names}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or kind == "i32"]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(num_warps=warps) | options)
    check(built, arch, float8)
    assert "PDL" not in names or follows(built.asm["ptx"]) == (arch >= 90)
    return built


def build_gluon(kernel: Any, constants: dict[str, Any], types: dict[str, str], **options: Any) -> Any:
    """A Gluon kernel compiled for Hopper as a launch with 16-byte aligned tensors and sizes would compile it."""
    names, constants = kernel.arg_names, _with_pdl(constants, 90)
    known = POINTERS | types
    signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in names}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or kind == "i32"]
    source = GluonASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )  # fmt: skip
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert follows(built.asm["ptx"])
    return built


def _with_pdl(constants: dict[str, Any], arch: int) -> dict[str, Any]:
    """As `launch.py` sets it."""
    return {"PDL": arch >= 90} | constants


def follows(ptx: str) -> bool:
    """Whether a kernel waits for those before it, ahead of all that touches memory."""
    memory = re.search(r"\b(?:ld|st|atom|red)\.(?:\w+\.)*?global|cp\.async|prefetch|ldu\.", ptx)
    before = ptx[: memory.start()] if memory else ptx
    waits = re.findall(r"griddepcontrol\.(\w+)", ptx)
    assert waits in ([], ["wait"], ["wait", "launch_dependents"]), waits
    assert len(re.findall(r"griddepcontrol", before)) == len(waits), "memory is touched before the kernels ahead end"
    return bool(waits)


def assembler_says(ptx: str) -> str:
    """Of PTX for Hopper: registers, spills, and what it could not do as asked."""
    path = triton.knobs.nvidia.ptxas.path
    command = [path, "-v", "--gpu-name=sm_90a", "-o", "/dev/null", "/dev/stdin"]
    return subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr


def check(built: Any, arch: int, float8: bool) -> None:
    """What holds for every kernel: it fits, has no float8 (but one that is for cards with it), and no instruction of
    another family.
    """
    ptx = built.asm["ptx"]
    assert built.metadata.shared <= SHARED_MEMORY[arch], f"{built.metadata.shared} bytes of shared memory"
    assert float8 or "e4m3" not in ptx and "e5m2" not in ptx and "f8" not in built.asm["ttir"]
    for instruction, only_in in (("wgmma.", (9,)), ("tcgen05.", (10,)), ("mul.rn.bf16x2", (9, 10, 12))):
        assert instruction not in ptx or family(arch) in only_in, instruction
    assert not unsettled_products(built.asm["ttgir"])


def unsettled_products(ttgir: str) -> list[str]:
    """wgmma instructions that run on into a loop's next step while their left operand lies in registers, which that
    step overwrites: nothing in such a step waits for them.
    """
    found: list[str] = []
    for line in ttgir.splitlines():
        if "ttng.warp_group_dot " in line and "opIdx = 0" in line and "isAsync = true" in line:
            found.append(line)
        elif "ttng.warp_group_dot_wait" in line and "pendings = 0" in line:
            found.clear()
        elif "scf.yield" in line and found:
            return found
    return []
