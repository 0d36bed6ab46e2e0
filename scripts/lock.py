"""Write the versions of the running environment to constraints.txt, the project's packages only.

Starts at the requirements in pyproject.toml and follows what is installed, so a package that
happens to be in the environment but that nothing of ours needs is left out.
"""

import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent

HEADER = """\
# Every version this project is installed with, dependencies of dependencies included.
# Used by each install: `make setup` here, the container image, CI. pyproject.toml holds the ranges.
#
# To change one: edit its line, `make setup test`, then `make lock`, which follows the requirements
# of pyproject.toml through the environment and rewrites this file (new packages appear, unused go).
#
# Tested: Python 3.11.7 on Linux x86_64 with the CPU build of torch. `torch==2.13.0` also matches
# builds with a local suffix such as 2.13.0+cpu.
"""

#: Pinned for the `gpu` extra and for CUDA builds of torch, which the development environment does
#: not have. triton is the version that torch 2.13.0's own metadata asks for; the CUDA libraries
#: beside it are pinned there too.
GPU_PINS = {
    "cuda-bindings": "13.0.3",
    "cuda-pathfinder": "1.9.1",
    "einops": "0.8.2",
    "flash-attn": "2.8.3.post2",
    "triton": "3.7.1",
}
GPU_HEADER = """
# Extra `gpu` and CUDA builds of torch. Not executed by the test suite yet. triton is what torch
# 2.13.0 asks for; the CUDA libraries that it brings are pinned exactly by its own metadata.
"""


def project_requirements() -> list[Requirement]:
    """Read the requirements of the package, of its `dev` extra and of its build."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = config["project"]
    lines = [
        *project["dependencies"],
        *project["optional-dependencies"]["dev"],
        *config["build-system"]["requires"],
    ]
    return [Requirement(line) for line in lines]


def installed_closure(roots: list[Requirement]) -> dict[str, str]:
    """Follow requirements through the installed packages.

    Args:
        roots: Where to start.

    Returns:
        Version by canonical name, without local suffixes such as `+cpu`.

    Raises:
        PackageNotFoundError: A requirement that applies here is not installed.
    """
    versions: dict[str, str] = {}
    visited: set[tuple[str, frozenset[str]]] = set()
    pending = list(roots)
    while pending:
        requirement = pending.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        environments = [{"extra": extra} for extra in ("", *requirement.extras)]
        if key in visited or not applies(requirement, [{"extra": ""}]):
            continue
        visited.add(key)
        distribution = metadata.distribution(requirement.name)
        versions[key[0]] = Version(distribution.version).public
        needed = [Requirement(line) for line in distribution.requires or []]
        for dependency in needed:
            if applies(dependency, environments):
                dependency.marker = None
                pending.append(dependency)
    return versions


def applies(requirement: Requirement, environments: list[dict[str, str]]) -> bool:
    """Tell whether a requirement's marker holds here, for any of the extras asked for."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate(environment) for environment in environments)


def main() -> None:
    """Rewrite constraints.txt."""
    versions = installed_closure(project_requirements())
    pins = [
        f"{name}=={version}" for name, version in sorted(versions.items()) if name not in GPU_PINS
    ]
    gpu_pins = [f"{name}=={version}" for name, version in sorted(GPU_PINS.items())]
    text = HEADER + "\n".join(["", *pins]) + "\n" + GPU_HEADER + "\n".join(gpu_pins) + "\n"
    (ROOT / "constraints.txt").write_text(text, encoding="utf-8")
    sys.stdout.write(f"constraints.txt: {len(pins)} packages, {len(gpu_pins)} for the GPU\n")


if __name__ == "__main__":
    main()
