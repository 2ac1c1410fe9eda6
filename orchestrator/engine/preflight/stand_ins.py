"""Stand-ins for what only the assumed machine has: compiled modules, kernels, streams. They can be imported and held, not called.

A preflight builds layers and asks classes; it computes nothing. So a name is enough wherever vLLM only keeps a kernel for
later, and a call of one is an error that names it, never a made-up result.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from stages.errors import PreflightImpossible

_OPTIONS = frozenset({"pass_configs"})
"""What decorators of kernels are given."""


class StandIn:
    """A kernel, class or module by name only."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "StandIn":
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self._name}.{name}")

    def __or__(self, other: object) -> "StandIn":
        return self

    def __getitem__(self, item: object) -> "StandIn":
        return self

    __ror__ = __or__

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """As a decorator, or with a decorator's options, it holds. Nothing computes: raises PreflightImpossible, which names it."""
        if len(args) == 1 and not kwargs and isinstance(args[0], FunctionType):
            return args[0]
        if not args and set(kwargs) <= _OPTIONS:
            return self
        raise PreflightImpossible(f"vLLM wants to run {self._name} to plan this model, and no kernel runs here", "--assume")


class StandInModules(MetaPathFinder, Loader):
    """Finds modules that are not on this machine: those named, and with a trailing dot all below a package.

    `facts` are what a module must answer truly, by module name.
    """

    def __init__(self, names: Sequence[str], facts: Mapping[str, Mapping[str, object]]) -> None:
        self._names = names
        self._facts = facts

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002 - the protocol's
        """A spec for a name that is stood in for; None leaves it to the other finders."""
        package = any(fullname == name.rstrip(".") or fullname.startswith(name) for name in self._names if name.endswith("."))
        return ModuleSpec(fullname, self, is_package=package) if package or fullname in self._names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module whose every attribute is a stand-in."""
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Its facts are real."""
        vars(module).update(self._facts.get(module.__name__, {}))


class _StandInModule(ModuleType):
    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}")


def stand_in_modules(names: Sequence[str], facts: Mapping[str, Mapping[str, object]] | None = None) -> None:
    """Let these modules be imported from now on. A real one that is on this machine is never hidden by one that merely could be."""
    sys.meta_path.append(StandInModules(names, facts or {}))


def hide(name: str) -> None:
    """Let a module that is on this machine not be imported, where the assumed machine has another of its name."""
    sys.modules.setdefault(name, _StandInModule(name))


def stand_in_attributes(module: ModuleType) -> None:
    """Let a module that is here only in part have every name."""
    vars(module)["__getattr__"] = StandIn(module.__name__).__getattr__


class _Kernels(torch._ops._OpNamespace):
    """`torch.ops._C` where the build lacks the assumed machine's kernels."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_supports_" in name:
                return _no
            if name.startswith("__"):
                raise
            return StandIn(f"torch.ops.{self.name}.{name}")


def _no(*args: object, **kwargs: object) -> bool:  # noqa: ARG001 - answers any question
    """Whether a weight kernel takes a case: none is here. It decides how weights are multiplied, never how states are kept."""
    return False


def stand_in_kernels(namespaces: Sequence[str]) -> None:
    """Let layers of the assumed machine keep kernels that this build lacks. Only after vLLM has asked which there are."""
    for name in namespaces:
        getattr(torch.ops, name).__class__ = _Kernels


class _Stream:
    """Layers make streams for later; nothing is ever put on one here."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass


def stand_in_streams() -> None:
    """Let layers make streams and events where torch was built without a device."""
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, type(name, (_Stream,), {}))


class OnMeta(TorchFunctionMode):
    """Every tensor that is asked for on the assumed device is made on `meta`; a single number stays one that can be read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the device of a factory's keyword argument; all else is as it was."""
        if func is torch.tensor and args and isinstance(args[0], int | float):
            return func(*args, **{**(kwargs or {}), "device": "cpu"})
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
