"""From reports/link_costs.csv to the page about it and to the costs that fraglab ships.

    python3 experiments/link_costs.py REPORTS_DIR   link_costs.md there, and the profile, which is
                                                    src/device/profiles/link-h200.json

The CSV is what `benches/link_costs.c` printed in several runs, with the number of the run in front.
A figure here is the median over the runs of a run's median. The page is the template
link_costs.md.in with every {{expression}} replaced by what it gives here.
"""

import csv
import json
import statistics
import sys
from pathlib import Path

from pages import HERE, fill, table

REPORTS = Path(sys.argv[-1])
PROFILE = HERE.parent / "src/device/profiles/link-h200.json"
KIB, MIB, GIB = 2**10, 2**20, 2**30
# What the host of one GPU has here, and its eighth.
CORES, EIGHTH = 16, 2
# The size that rates are taken at: an ordinary chunk.
CHUNK = 256 * MIB
ADAM_PARAMETERS = 256 * MIB

with open(REPORTS / "link_costs.csv", newline="") as file:
    ROWS = list(csv.DictReader(line for line in file if not line.startswith("#")))
RUNS = {}
for row in ROWS:
    key = row["measure"], int(row["bytes"]), int(row["threads"])
    RUNS.setdefault(key, {})[int(row["run"])] = float(row["median_us"])


def us(measure, size, threads=1, run=None):
    """Microseconds: over all runs, or of one."""
    times = RUNS[measure, size, threads]
    return times[run] if run else statistics.median(times.values())


def points(measure):
    """[bytes, microseconds], rising."""
    sizes = sorted({size for name, size, _ in RUNS if name == measure})
    return [[size, round(us(measure, size), 2)] for size in sizes]


def rate(measure, size, threads=1):
    """Bytes a second."""
    return round(size / us(measure, size, threads) * 1e6)


def adam_ns(measure, threads):
    """Nanoseconds a parameter."""
    return round(us(measure, ADAM_PARAMETERS, threads) * 1000 / ADAM_PARAMETERS, 4)


def by_threads(value):
    return [[threads, value(threads)] for threads in (1, 2, 4, 8, 16, 32)]


# The profile.

SOURCE = (
    "measured: benches/link_costs.c on three virtual machines with NVIDIA H200s (PCIe 5.0 x16), "
    "driver 580.159.04, hosts Intel family 6 model 207, 16 cores a GPU, 2026-11-30; medians over "
    "the runs in reports/link_costs.csv, made by experiments/link_costs.py. Points are [bytes, "
    "microseconds] of one call, waited for. Rates are those of arrays of 256 MiB, fixed cost "
    "included: device_copy counts bytes copied (the memory moves twice that), gpu_elementwise all "
    "bytes of two arrays read and one written, collective the bytes that a rank receives in an "
    "all-gather. host_bytes_per_s is a triad of 16 threads on arrays of 1 GiB and counts 12 bytes "
    "an element, host_fill is memset likewise; host_adam reads fp32 gradients with 16 threads. "
    "peer_copy and the collectives are of 2 GPUs on NVLink, NCCL 2.28.3 without multicast, one "
    "process; for more GPUs nothing was measured. collective_latency_us is a whole all-gather of "
    "1 KiB. Nothing is taken from a data sheet"
)


def profile():
    host = 3 * GIB
    return {
        "name": "link-h200",
        "gpu": "NVIDIA H200",
        "driver": "580.159.04",
        "date": "2026-11-30",
        "source": SOURCE,
        "pinned_h2d": points("pinned_h2d"),
        "pinned_d2h": points("pinned_d2h"),
        "pageable_h2d": points("pageable_h2d"),
        "pageable_d2h": points("pageable_d2h"),
        "pageable_fresh_d2h": points("fresh_d2h"),
        "pinned_alloc_us": points("pinned_alloc"),
        "pinned_free_us": points("pinned_free"),
        "pageable_touch_us": points("touch"),
        "gpu_malloc_us": points("gpu_malloc"),
        "gpu_free_us": points("gpu_free"),
        "device_copy_bytes_per_s": rate("device_copy", CHUNK),
        "memset_bytes_per_s": rate("device_fill", CHUNK),
        "gpu_elementwise_bytes_per_s": rate("device_triad", 3 * CHUNK),
        "host_bytes_per_s": rate("host_triad", host, CORES),
        "host_bytes_per_s_by_threads": by_threads(lambda n: rate("host_triad", host, n)),
        "host_fill_bytes_per_s": rate("host_fill", GIB, CORES),
        "host_fill_bytes_per_s_by_threads": by_threads(lambda n: rate("host_fill", GIB, n)),
        "host_adam_ns_per_parameter": adam_ns("host_adam32", CORES),
        "host_adam_ns_per_parameter_by_threads": by_threads(lambda n: adam_ns("host_adam32", n)),
        "host_adam_fp16_gradient_ns_per_parameter": adam_ns("host_adam16", CORES),
        "peer_copy_bytes_per_s": rate("peer_copy", CHUNK),
        "collective_bytes_per_s": rate("all_gather", CHUNK),
        "collective_latency_us": round(us("all_gather", KIB), 2),
    }


def write_profile():
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in profile().items()]
    PROFILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


# The page.


def size_name(size):
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size // KIB} KiB"


def figure(value):
    """Three digits, thousands apart."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def gb(measure, size, threads=1, of=None):
    """GB a second; `of`: the bytes to count, if not those of the row."""
    return figure((of or size) / us(measure, size, threads) / 1000)


def cell(measure, size):
    """Microseconds, and GB a second."""
    known = (measure, size, 1) in RUNS
    return f"{figure(us(measure, size))} ({gb(measure, size)})" if known else "–"


def spread(measure, size, threads=1):
    """Least and most of the runs, in milliseconds."""
    times = RUNS[measure, size, threads].values()
    return f"{figure(min(times) / 1000)} to {figure(max(times) / 1000)} ms"


def sizes_table(measures, sizes, heads):
    rows = [[size_name(size)] + [cell(measure, size) for measure in measures] for size in sizes]
    return table(["size"] + heads, rows)


def link_table():
    measures = ["pinned_h2d", "pinned_d2h", "pageable_h2d", "pageable_d2h", "fresh_d2h"]
    heads = ["pinned, up", "pinned, down", "pageable, up", "pageable, down", "down to fresh memory"]
    return sizes_table(measures, [64 * KIB << i for i in range(15)], heads)


def host_allocation_table():
    measures = ["pinned_alloc", "pinned_free", "touch", "touch_huge", "unmap"]
    heads = ["pinned: allocate", "pinned: free", "pageable: first touch", "the same, huge pages",
             "pageable: unmap"]
    sizes = [size * MIB for size in (1, 4, 16, 64, 128, 256, 384, 512, 768, 1024, 4096)]
    return sizes_table(measures, sizes, heads)


def gpu_allocation_table():
    sizes = [size * MIB for size in (2, 32, 128, 192, 256, 288, 384, 512, 768, 1024, 2048)]
    rows = [
        [size_name(size)]
        + [figure(us("gpu_malloc", size, run=run)) for run in (1, 2, 3)]
        + [figure(us("gpu_malloc", size)), figure(us("gpu_free", size))]
        for size in sizes
    ]
    return table(["size", "run 1", "run 2", "run 3", "median", "free, median"], rows)


def device_table():
    rows = []
    for size in (64 * KIB, MIB, 16 * MIB, 64 * MIB, 128 * MIB, 256 * MIB, 512 * MIB, GIB):
        row = [cell("device_copy", size), cell("device_fill", size), cell("device_triad", 3 * size)]
        rows.append([size_name(size)] + row + [cell("peer_copy", size)])
    return table(["size of an array", "copy", "fill", "triad", "copy to another GPU"], rows)


def collective_table():
    measures = ["all_gather", "reduce_scatter", "broadcast"]
    heads = ["all-gather", "reduce-scatter", "broadcast"]
    return sizes_table(measures, [KIB << 2 * i for i in range(11)], heads)


def adam_cell(measure, threads, bytes_each):
    """Nanoseconds a parameter, and GB a second."""
    moved = gb(measure, ADAM_PARAMETERS, threads, bytes_each * ADAM_PARAMETERS)
    return f"{adam_ns(measure, threads):.3f} ({moved})"


def host_table():
    rows = []
    for threads in (1, 2, 4, 8, 16, 32):
        row = [adam_cell("host_adam32", threads, 28), adam_cell("host_adam16", threads, 26)]
        row += [gb("host_triad", 3 * GIB, threads), gb("host_copy", 2 * GIB, threads)]
        rows.append([str(threads)] + row + [gb("host_fill", GIB, threads)])
    heads = ["threads", "ADAM, fp32 gradient", "ADAM, fp16 gradient", "triad", "copy", "fill"]
    return table(heads, rows)


def most_apart(measures, least_size, but):
    """How far the runs are apart at most, in percent of the least, sizes from `least_size` on."""
    keys = [key for key in RUNS if key[0] in measures and key[1] >= least_size and key != but]
    return max(100 * (max(RUNS[key].values()) / min(RUNS[key].values()) - 1) for key in keys)


def times_over(measure, size, other, of=None):
    """How many times as long as `other` of the same size."""
    return f"{us(measure, size) / us(other, of or size):.0f}"


if __name__ == "__main__":
    write_profile()
    fill("link_costs", REPORTS, globals())
