import ctypes

import torch


def memory_stats(device=None):
    return torch.script.stats()


def empty_cache():
    torch._C._cuda_emptyCache()


def set_per_process_memory_fraction(fraction, device=None):
    torch._C._cuda_setMemoryFraction(fraction, device or 0)


def reset_peak_memory_stats(device=None):
    torch._C._cuda_resetPeakMemoryStats(device or 0)


def reset_accumulated_memory_stats(device=None):
    torch._C._cuda_resetAccumulatedMemoryStats(device or 0)


def get_allocator_backend():
    return torch.script.backend


def _record_memory_history(enabled="all", context="all", stacks="all", max_entries=0):
    torch.script.recording = enabled is not None


def _snapshot():
    snapshot = dict(torch.script.snapshot)
    if not torch.script.recording:
        snapshot["device_traces"] = [[]]
    return snapshot


def _no_stats(*_):
    raise RuntimeError("the allocator that is plugged in has no statistics")


memory_allocated = max_memory_allocated = _no_stats
memory_reserved = max_memory_reserved = _no_stats


class _Inner:
    def __init__(self):
        self.hooks = {}

    def set_init_fn(self, address):
        self.hooks["init"] = address

    def set_reset_fn(self, address):
        self.hooks["reset"] = address

    def set_memory_fraction_fn(self, address):
        self.hooks["memory_fraction"] = address

    def set_record_stream_fn(self, address):
        self.hooks["record_stream"] = address

    def set_base_alloc_fn(self, address):
        self.hooks["base_alloc"] = address

    def set_begin_allocate_to_pool(self, address):
        self.hooks["pool_begin"] = address

    def set_end_allocate_to_pool_fn(self, address):
        self.hooks["pool_end"] = address

    def set_release_pool(self, address):
        self.hooks["pool_release"] = address


class CUDAPluggableAllocator:
    def __init__(self, path, alloc, free):
        library = ctypes.CDLL(path)
        self.functions = [getattr(library, alloc), getattr(library, free)]
        self._inner = _Inner()

    def allocator(self):
        return self._inner


def change_current_allocator(allocator):
    if torch.script.initialized:
        raise RuntimeError("Can't swap an already initialized allocator")
    torch.script.calls.append(allocator)
