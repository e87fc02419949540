#!/usr/bin/env python3
"""Writes a made-up profiler trace of about so many MB to standard output.

    benches/profiler_trace.py 1000 | gzip -1 > profile.json.gz

One event in ten is a `[memory]` event of the GPU, as PyTorch's profiler writes it; the others are
operators, which a reader of memory has to skip. Used for the figures in reports/performance.md.
"""
import sys

OPERATOR = (
    '{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 7, "ts": %.3f, "dur": 11.5, '
    '"args": {"External id": %d, "Record function id": 0, "Input Dims": [[4096, 2048], [2048, 2048]], '
    '"Input type": ["c10::BFloat16", "c10::BFloat16"]}},\n'
)
MEMORY = (
    '{"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 7, "tid": 7, '
    '"ts": %.3f, "args": {"Total Reserved": 2147483648, "Total Allocated": %d, "Bytes": %d, '
    '"Addr": %d, "Device Id": 0, "Device Type": 1, "Ev Idx": %d}},\n'
)
SIZE, LIVE = 2 << 20, 512

out = sys.stdout
left = int(sys.argv[1]) * 10**6
left -= out.write('{"schemaVersion": 1, "deviceProperties": [], "traceEvents": [\n')
index = 0
while left > 0:
    if index % 10:
        left -= out.write(OPERATOR % (index, index))
    else:
        # LIVE blocks are asked for, then given back, and so on.
        place, back = index // 10 % LIVE, index // 10 // LIVE % 2
        allocated = SIZE * (LIVE - place - 1 if back else place + 1)
        size = -SIZE if back else SIZE
        left -= out.write(MEMORY % (index, allocated, size, 0x7F0000000000 + place * SIZE, index))
    index += 1
out.write('{"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}}]}\n')
