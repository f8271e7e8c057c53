"""Lets SGLang 0.5.23 run beside the CPU build of torch, for tests. Not for GPUs, and not for other versions.

Python imports a module of this name at start, in every process that has this folder on its path.

- torchvision's operators do not load beside a CPU torch: those that its Python part registers for are declared here.
- Mooncake sends index tensors from pinned memory, which needs CUDA: the TCP sender is told that it has none.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Before(importlib.abc.MetaPathFinder):
    """Does something once, as a module is first looked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        return self.found(name)

    def found(self, name: str) -> ModuleSpec | None:
        return None


class _Torchvision(_Before):
    def found(self, name: str) -> ModuleSpec | None:
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        sys.modules[__name__].__dict__["kept"] = library  # a library that is collected undeclares its operators


class _Mooncake(_Before):
    def found(self, name: str) -> ModuleSpec | None:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            module.MooncakeKVSender.supports_host_tensor_indices = False

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path[:0] = [_Torchvision("torchvision"), _Mooncake("sglang.srt.disaggregation.mooncake.conn")]
