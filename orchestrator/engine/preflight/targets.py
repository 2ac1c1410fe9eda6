"""The machines a preflight can assume, as values; nothing of vLLM is imported here."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

_GIB = 1 << 30


class Vendor(StrEnum):
    """Whose devices a target has."""

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"


@dataclass(frozen=True, slots=True)
class Target:
    """A machine as vLLM asks about it: what its choice of attention backend, layout and block size depends on."""

    name: str
    vendor: Vendor
    device: str
    capability: tuple[int, int] = (0, 0)
    memory_bytes: int = 0
    compute_units: int = 0

    @property
    def assumption(self) -> str:
        """What is taken for granted about it, in words."""
        if self.vendor is Vendor.CPU:
            return "a CPU like this machine's"
        libraries = "FlashAttention, FlashInfer, DeepGEMM, Triton" if self.vendor is Vendor.CUDA else "Triton; no AITER, no flash-attn"
        return f"{self.device} with what a release of vLLM for it brings or requires ({libraries})"


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("cpu", Vendor.CPU, "CPU"),
        Target("cuda-sm90", Vendor.CUDA, "NVIDIA H200", (9, 0), 141 * _GIB, 132),
        Target("cuda-sm100", Vendor.CUDA, "NVIDIA B200", (10, 0), 180 * _GIB, 148),
        Target("rocm-gfx942", Vendor.ROCM, "AMD_Instinct_MI300X", (9, 4), 192 * _GIB, 304),
    )
}
"""By the name that `--assume` takes."""
