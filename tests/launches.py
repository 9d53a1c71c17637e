"""What Inductor's code for a GPU launches, in order: one line each, calls of eager launchers expanded to theirs."""

import re
from collections.abc import Iterator

import fakecuda

# What an eager launcher launches itself, by what the generated code calls.
EXPANDED = {
    "nvfp4.moe_route": ["route_at_once"],
    "nvfp4_linear_product HOPPER": ["hopper grouped_product: y"],
    "nvfp4_linear_product LOOP": ["grouped_linear"],
    "nvfp4_dgrad_product HOPPER": ["hopper grouped_product: gx"],
    "nvfp4_dgrad_product LOOP": ["grouped_dgrad"],
}
# Of a fused kernel's parts, those that say nothing: casts, views, constants.
SILENT = {"", "to", "copy", "view", "unsqueeze", "expand", "scalar", "tensor", "unbind", "new", "clamp", "min"}
ROUTER = re.compile(r"softmax|scatter|(?<=per_fused_)div_sum")  # and its backward


def launches(source: str, path: str = "LOOP") -> Iterator[str]:
    """Each launch of a generated module; `path` is the way that eager's products go on the card."""
    templates = {name: body(kernel) for name, kernel in fakecuda.triton_kernels(source).items()}
    for line in source.split("def call(")[1].splitlines():
        if match := re.search(r"(triton_\w+)\.run\(", line):
            yield templates[match[1]] or generated(match[1])
        elif match := re.search(r"extern_kernels\.(nvfp4_\w+)\(", line):
            named = re.search(r"path='(\w+)'", line)
            yield from EXPANDED[f"{match[1]} {named[1] if named else path}"]
        elif match := re.search(r"extern_kernels\.(\w+)\(", line):
            yield f"library: {match[1]}"
        elif (match := re.search(r"torch\.ops\.([\w.]+?)(\.default)?\(", line)) and match[1] != "aten.view.dtype":
            yield from EXPANDED.get(match[1], [f"library: {match[1]}"])


def body(kernel: str) -> str | None:
    """The kernel that a template calls."""
    match = re.search(r"^from torch_nvfp4\.lowering\.kernels\.\w+ import (\w+) as body", kernel, re.MULTILINE)
    return f"template: {match[1]}" if match else None


def generated(name: str) -> str:
    """`triton_red_fused_add_…_3` as a reader's words."""
    match = re.fullmatch(r"triton_(poi|red|per)_fused_(\w+?)_\d+", name)
    assert match is not None, name
    if router := ROUTER.search(name):
        return f"router: {router[0]}"
    kind = "pointwise" if match[1] == "poi" else "rows"
    return f"{kind}: {' '.join(part for part in match[2].split('_') if part not in SILENT)}"


def of_router(launch: str) -> bool:
    return launch.startswith("router: ") or launch in ("library: mm", "library: addmm", "library: aten.topk")


def buffers(source: str) -> Iterator[list[int]]:
    """The sizes of every tensor that the module allocates or that an op hands it."""
    for match in re.finditer(r"empty_strided_cuda\(\(([\d, ]*)\)", source):
        yield [int(size) for size in match[1].split(",") if size.strip()]
    for match in re.finditer(r"assert_size_stride\(buf\d+, \(([\d, ]*)\)", source):
        yield [int(size) for size in match[1].split(",") if size.strip()]
