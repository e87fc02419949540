"""The functions behind torch.cuda."""

import torch


def _cuda_memoryStats(device):
    nested = {}
    for name, value in torch.script.stats().items():
        *path, last = name.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


def _cuda_emptyCache():
    script = torch.script
    script.calls.append("empty_cache")
    entries = script.entries()
    released = ("segment_free", "segment_unmap", "free_completed")
    while script.position < len(entries) and entries[script.position]["action"] in released:
        script.position += 1


def _cuda_setMemoryFraction(fraction, device):
    torch.script.fraction = fraction


def _accelerator_setAllocatorSettings(text):
    torch.script.calls.append(text)


def _cuda_resetPeakMemoryStats(device):
    script = torch.script
    for name, value in script.stats().items():
        if name.endswith(".peak"):
            script.offsets[name] = script.offsets.get(name, 0) + value


def _cuda_resetAccumulatedMemoryStats(device):
    script = torch.script
    for name, value in script.stats().items():
        if not name.endswith((".current", ".peak")):
            script.offsets[name] = script.offsets.get(name, 0) + value


def _cuda_setMemoryMetadata(text):
    torch.script.metadata = text
