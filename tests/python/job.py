"""A job that does what a recording shows, on the stand-in for torch, and records itself.

    job.py RECORDING OUT [OPTION...]

Options: marks (a phase at every hundredth entry, before allocs and frees alike), caches (calls
empty_cache where the recording shows one), twice (and once more, with nothing to release),
resets (of statistics, on the way), later (sets the memory limit on the way), fail (raises at the
end).
"""

import gzip
import json
import pickle
import sys

import fraglab_torch as fraglab
import torch

CLOSING = ("alloc", "oom", "free_requested")


def cache_calls(entries):
    """Where groups begin that release memory and obtain none: only empty_cache does that."""
    starts, start = [], None
    for index, entry in enumerate(entries + [{"action": "free_requested"}]):
        if entry["action"] in CLOSING:
            group = [e["action"] for e in entries[start:index]] if start is not None else []
            released = any(a in ("segment_free", "segment_unmap") for a in group)
            obtained = any(a in ("segment_alloc", "segment_map") for a in group)
            if released and not obtained and entry["action"] != "oom":
                starts.append(start)
            start = None
        elif entry["action"] == "free_completed" and start is None:
            # The completion of a free is its own.
            before = entries[index - 1] if index else {}
            own = before.get("action") == "free_requested" and before["addr"] == entry["addr"]
            start = None if own else index
        elif start is None:
            start = index
    return starts


def main():
    recording, out, *options = sys.argv[1:]
    with gzip.open(recording) as file:
        snapshot = pickle.load(file)
    with open(recording.replace(".pickle.gz", ".truth.json")) as file:
        truth = json.load(file)
    entries = [e for e in snapshot["device_traces"][0] if e["action"] != "snapshot"]
    snapshot["device_traces"] = [entries]
    stats = dict(truth["stats"])
    caches = cache_calls(entries) if "caches" in options else []
    if "twice" in options:
        stats["num_sync_all_streams"] += len(caches)
    torch.play(snapshot, stats, truth["total_memory"])
    marks = []
    with fraglab.record(out) as recorder:
        share = truth["cap_gib"] * (1 << 30) / truth["total_memory"]
        if share:
            torch.cuda.set_per_process_memory_fraction(0.9 if "later" in options else share)
        for index, entry in enumerate(entries):
            if "later" in options and index > 1000 and entries[index - 1]["action"] == "alloc":
                torch.advance_to(index)
                torch.cuda.set_per_process_memory_fraction(share)
                options.remove("later")
            if index in caches:
                torch.advance_to(index)
                torch.cuda.empty_cache()
                if "twice" in options:
                    torch.cuda.empty_cache()
            # Between two operations: what stands before an alloc may be its own.
            if "marks" in options and index >= 100 * (len(marks) + 1):
                if entries[index - 1]["action"] in ("alloc", "oom"):
                    torch.advance_to(index)
                    fraglab.phase(f"step{len(marks)}.entry{index}")
                    marks.append(index)
            if "resets" in options and index == len(entries) // 2:
                torch.advance_to(index)
                torch.cuda.reset_accumulated_memory_stats()
                torch.cuda.reset_peak_memory_stats()
        torch.advance_to(len(entries))
        if "fail" in options:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    print(json.dumps({"path": str(recorder.path), "marks": marks, "caches": len(caches)}))


main()
