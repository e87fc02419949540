"""Writes the fixtures of tests/import.rs with CPython's own pickle module.

    python3 tests/import/make_fixtures.py            # protocol*.pickle, cpp.pickle, odd/*.pickle
    python3 tests/import/make_fixtures.py RECORDINGS # recordings.csv too, from that folder

The fixtures are committed; this script says what is in them and how they came to be.
"""

import glob
import gzip
import os
import pickle
import struct
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
BASE = 0x7F0000000000
SIDE = 0x556677889900
T0 = 1_795_964_913_482_800


def snapshot():
    """A small snapshot of every kind of value: shared frames and stacks, two devices, an oom."""
    outer = {"name": "main", "filename": "train.py", "line": 70000}
    inner = {"name": "forward", "filename": "model.py", "line": 12}
    deep, flat = [inner, outer], [outer]
    time = iter(range(T0, T0 + 1000, 7))

    def entry(action, addr, size, stream=0, frames=None, meta="", **more):
        key = "device_free" if action == "oom" else "addr"
        e = {"action": action, key: addr, "size": size, "stream": stream, "time_us": next(time)}
        e.update(compile_context="N/A", user_metadata=meta, **more)
        if frames is not None:
            e["frames"] = frames
        return e

    trace = [
        entry("segment_alloc", BASE, 2097152),
        entry("alloc", BASE, 1000, frames=deep, meta="step0.forward"),
        entry("alloc", BASE + 1024, 300, SIDE, frames=deep, pool_id=(0, 0)),
        entry("free_requested", BASE + 1024, 300, SIDE, frames=flat),
        entry("snapshot", 0, 1300),
        entry("free_requested", BASE, 1000, meta="step0.backward"),
        entry("free_completed", BASE, 1000),
        entry("free_completed", BASE + 1024, 300, SIDE),
        entry("alloc", BASE, 70000, frames=flat, meta="step0.forward"),
        entry("oom", 123456789, 3 << 40, frames=flat),
    ]
    blocks = [
        {"address": BASE, "size": 70144, "requested_size": 70000, "state": "active_allocated", "frames": flat},
        {"address": BASE + 70144, "size": 2027008, "requested_size": 0, "state": "inactive", "frames": []},
    ]
    segment = {"device": 1, "address": BASE, "total_size": 2097152, "allocated_size": 70144,
               "active_size": 70144, "requested_size": 70000, "stream": 0, "segment_type": "small",
               "segment_pool_id": (0, 0), "is_expandable": False, "frames": deep, "blocks": blocks}
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8", "max_split_size": -1,
                "garbage_collection_threshold": 0.8, "expandable_segments": False,
                "roundup_power2_divisions": {str(1 << i): 0 for i in range(16)}}
    notes = [{"name": "ProfilerStep#0", "stage": "START", "device": 1, "time_us": T0 + 3},
             {"name": "ProfilerStep#0", "stage": "END", "device": 1, "time_us": T0 + 50}]
    return {"segments": [segment], "device_traces": [[], trace], "allocator_settings": settings,
            "external_annotations": notes, "unknown": [None, True, 1.5, -7, 1 << 70, "é" * 300]}


class Cpp:
    """The dialect of torch::jit::Pickler: protocol 2; texts and shared containers are put in the
    memo with BINPUT, integers beyond 32 bits are LONG1 of 8 bytes, and every dict and list passes
    through torch.jit._pickle.restore_type_tag."""

    def __init__(self):
        self.out, self.memo, self.memo_next = bytearray(b"\x80\x02"), {}, 0

    def put(self, key):
        self.memo[key] = i = self.memo_next
        self.memo_next += 1
        self.out += b"q" + bytes([i]) if i < 256 else b"r" + struct.pack("<I", i)

    def get(self, key):
        if key not in self.memo:
            return False
        i = self.memo[key]
        self.out += b"h" + bytes([i]) if i < 256 else b"j" + struct.pack("<I", i)
        return True

    def tag(self, open_close, fill, type_name):
        if not self.get("tag"):
            self.out += b"ctorch.jit._pickle\nrestore_type_tag\n"
            self.put("tag")
        self.out += open_close[:1] + b"("
        fill()
        self.out += open_close[1:]
        self.push(type_name)
        self.out += b"\x86R"

    def push(self, v):
        out = self.out
        if isinstance(v, bool):
            out += b"\x88" if v else b"\x89"
        elif v is None:
            out += b"N"
        elif isinstance(v, int):
            if 0 <= v < 256:
                out += b"K" + bytes([v])
            elif 0 <= v < 65536:
                out += b"M" + struct.pack("<H", v)
            elif -(1 << 31) <= v < 1 << 31:
                out += b"J" + struct.pack("<i", v)
            else:
                out += b"\x8a\x08" + struct.pack("<q", v)
        elif isinstance(v, float):
            out += b"G" + struct.pack(">d", v)
        elif isinstance(v, str):
            if not self.get(v):
                data = v.encode()
                out += b"X" + struct.pack("<I", len(data)) + data
                self.put(v)
        elif isinstance(v, tuple):
            for item in v:
                self.push(item)
            out += b"\x86"
        elif not self.get(id(v)):
            if isinstance(v, dict):
                self.tag(b"}u", lambda: [self.push(x) for kv in v.items() for x in kv], "Dict[Any, Any]")
            else:
                self.tag(b"]e", lambda: [self.push(x) for x in v], "List[Any]")
            self.put(id(v))


def write(name, data):
    path = os.path.join(HERE, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def odd_pickles():
    """Pickles whose shape is legal and unusual."""
    plain = snapshot()
    twice = snapshot()
    twice["device_traces"] = [twice["device_traces"][1]] * 2
    write("odd/same_list_twice.pickle", pickle.dumps(twice, 4))

    entries = plain["device_traces"][1]
    repeated = dict(plain, device_traces=[[entries[0], entries[1], entries[0]]])
    write("odd/same_dict_twice.pickle", pickle.dumps(repeated, 4))

    # Cycles: a dict in itself, a list in itself, a tuple reached through its own list.
    cyclic = snapshot()
    cyclic["self"] = cyclic
    loop = []
    loop.append(loop)
    pair = ([],)
    pair[0].append(pair)
    cyclic["loop"], cyclic["pair"] = loop, pair
    cyclic["device_traces"][1][1]["frames"] = loop
    write("odd/cyclic.pickle", pickle.dumps(cyclic, 4))

    # A stack of 2500 frames: the writer appends it in three batches.
    long = snapshot()
    frames = [{"name": f"f{i}", "filename": "deep.py", "line": i} for i in range(2500)]
    long["device_traces"][1][1]["frames"] = frames
    write("odd/long_stack.pickle", pickle.dumps(long, 4))

    write("odd/segments_only.pickle", pickle.dumps(plain["segments"], 4))


def recordings(folder):
    """What CPython reads from every recording: entries without snapshots and, where the final
    segments lack their blocks, without frees of blocks that were allocated before the history; and
    a digest of (action, addr, size, stream)."""
    actions = ["alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
               "segment_map", "segment_unmap", "oom"]
    rows = ["name,entries,frees_without_alloc,digest\n"]
    for path in sorted(glob.glob(os.path.join(folder, "*.pickle.gz"))):
        snapshot = pickle.load(gzip.open(path))
        listed = all(segment["blocks"] for segment in snapshot["segments"])
        traces = [t for t in snapshot["device_traces"] if t]
        assert len(traces) == 1, path
        state, entries, missing, digest = {}, 0, 0, 0xCBF29CE484222325
        for e in traces[0]:
            action = e["action"]
            addr = e["device_free"] if action == "oom" else e["addr"]
            if action == "snapshot":
                continue
            if action == "alloc":
                state[addr] = "live"
            elif action == "free_requested":
                if state.get(addr) != "live":
                    missing += 1
                    if not listed:
                        continue
                state[addr] = "pending"
            elif action == "free_completed":
                if state.pop(addr, None) is None:
                    continue
            entries += 1
            for word in (actions.index(action), addr, e["size"], e["stream"]):
                digest = ((digest ^ word) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
        name = os.path.basename(path)[: -len(".pickle.gz")]
        rows.append(f"{name},{entries},{missing},{digest:016x}\n")
    write("recordings.csv", "".join(rows).encode())


if __name__ == "__main__":
    for protocol in range(2, 6):
        data = snapshot()
        if protocol > 2:  # protocol 2 writes bytes as a call
            data["unknown"].append(b"bytes")
        write(f"protocol{protocol}.pickle", pickle.dumps(data, protocol))
    cpp = Cpp()
    data = snapshot()
    del data["unknown"]
    cpp.push(data)
    write("cpp.pickle", bytes(cpp.out) + b".")
    odd_pickles()
    if len(sys.argv) > 1:
        recordings(sys.argv[1])
