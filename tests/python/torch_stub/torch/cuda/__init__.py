import types

import torch

from . import memory
from .memory import (  # noqa: F401
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
)

OutOfMemoryError = torch.OutOfMemoryError


def is_available():
    return torch.script.available


def is_initialized():
    return torch.script.initialized


def init():
    torch.script.initialized = True


def device_count():
    return 1


def current_device():
    return 0


def get_device_properties(device):
    return types.SimpleNamespace(name="Stub GPU", total_memory=torch.script.total_memory)


__all__ = ["memory"]
