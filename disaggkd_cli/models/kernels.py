"""Kernels of extra packages (flash-linear-attention, causal-conv1d, mamba-ssm) only ever see tensors of a GPU.

transformers binds a package's kernels when a model's module is imported, by the package being installed and not by
where tensors lie. Models are proved, and in small runs trained, on CPUs too, where Triton kernels raise. Beside each
kernel transformers keeps its own torch function of the same meaning; tensors that are not on a GPU go to that.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor, nn

_WITHOUT_KERNELS = ("cpu", "meta")


def choose_kernels_by_device(model: nn.Module) -> nn.Module:
    """Make the functions that `model`'s classes call choose between kernel and torch by their tensors; return `model`.

    Changes the modules of transformers that define those classes, once a process; without the packages nothing.
    """
    for name in {type(module).__module__ for module in model.modules()}:
        if name.startswith("transformers.") and name in sys.modules:
            _choose_in(sys.modules[name])
    return model


def _choose_in(module: ModuleType) -> None:
    for name, function in list(vars(module).items()):
        if inspect.isfunction(function) and (own := _torch_function(function)) is not None:
            setattr(module, name, _by_device(function, own))


def _torch_function(function: Callable) -> Callable | None:
    """Return transformers' torch function beneath one that calls a package's kernel, else None.

    It is told by what transformers' wrapper closes over (`use_kernel_func_from_hub_with_fallback`).
    """
    closed_over = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if not {"torch_function", "is_new_implementation"} <= closed_over.keys():
        return None
    return closed_over["torch_function"].cell_contents if closed_over["is_new_implementation"].cell_contents else None


def _by_device(kernel: Callable, own: Callable) -> Callable:
    known = tuple(inspect.signature(own).parameters)

    @functools.wraps(own)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        tensor = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
        if tensor is None or tensor.device.type not in _WITHOUT_KERNELS:
            return kernel(*args, **kwargs)
        if kwargs.get("cu_seqlens") is not None:
            raise ValueError(f"{own.__name__} cannot keep packed documents apart on {tensor.device}")
        return own(*args, **{name: value for name, value in kwargs.items() if name in known})

    return chosen
