from setuptools import find_packages, setup

# All else is in pyproject.toml. It can map `lowering` to torch_nvfp4.lowering, but not find its subpackages.
setup(
    packages=[
        *find_packages(include=["torch_nvfp4", "torch_nvfp4.*"]),
        *(f"torch_nvfp4.{name}" for name in find_packages(include=["lowering", "lowering.*"])),
    ]
)
