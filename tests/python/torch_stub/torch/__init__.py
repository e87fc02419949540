"""Stands in for torch in tests of fraglab_torch.py: an allocator that plays a recorded history.

`play(snapshot)` loads the history; `advance_to(index)` lets the recorded program go on. Statistics
are sums over the entries that have been played.
"""

import types

__version__ = "2.11.0+stub"


class Tensor:
    requires_grad = False


class _Script:
    def __init__(self):
        self.snapshot = {"segments": [], "device_traces": [[]], "allocator_settings": {}}
        self.position = 0
        self.recording = False
        self.initialized = False
        self.available = True
        self.backend = "native"
        self.end_stats = {}
        self.total_memory = 80 << 30
        self.fraction = 1.0
        self.offsets = {}
        self.calls = []
        self.metadata = ""

    def entries(self):
        return self.snapshot["device_traces"][0]

    def sums(self):
        names = {
            "alloc": "allocation.all.allocated",
            "free_requested": "allocation.all.freed",
            "free_completed": "active.all.freed",
            "oom": "num_ooms",
        }
        sums = dict.fromkeys(names.values(), 0)
        sums["reserved_bytes.all.allocated"] = sums["reserved_bytes.all.freed"] = 0
        for entry in self.entries()[: self.position]:
            action, size = entry["action"], entry["size"]
            if action in names:
                sums[names[action]] += 1
            elif action in ("segment_alloc", "segment_map"):
                sums["reserved_bytes.all.allocated"] += size
            elif action in ("segment_free", "segment_unmap"):
                sums["reserved_bytes.all.freed"] += size
        return sums

    def stats(self):
        stats = self.sums()
        if self.position == len(self.entries()):
            stats.update(self.end_stats)
        reserved = stats["reserved_bytes.all.allocated"] - stats["reserved_bytes.all.freed"]
        stats["reserved_bytes.all.current"] = reserved
        for name, lost in self.offsets.items():
            if name in stats:
                stats[name] = max(0, stats[name] - lost)
        return stats


script = _Script()


def play(snapshot, end_stats=None, total_memory=80 << 30):
    script.snapshot = snapshot
    script.end_stats = end_stats or {}
    script.total_memory = total_memory


def advance_to(index):
    script.position = max(script.position, index)


class OutOfMemoryError(RuntimeError):
    pass


def device(text):
    index = int(text.split(":")[1]) if ":" in text else None
    return types.SimpleNamespace(index=index)


from . import _C, autograd, cuda  # noqa: E402,F401
