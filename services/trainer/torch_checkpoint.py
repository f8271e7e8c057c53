"""Sharded checkpoints of a model and its optimiser by `torch.distributed.checkpoint`, whose types say too little.

Written by any number of ranks, readable by any other.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch's stubs are partial)

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer


def save(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Write both into `folder`; collective."""
    parameters, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": parameters, "optimizer": moments}
    state_dict_saver.save(state, checkpoint_id=str(folder))


def load(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Read both from `folder`, in place; collective."""
    parameters, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": parameters, "optimizer": moments}
    state_dict_loader.load(state, checkpoint_id=str(folder))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
