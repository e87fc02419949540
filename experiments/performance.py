"""Measures for experiments/performance.sh, and the page made of them.

    performance.py PART FRAGLAB WORKLOADS IMPORT RECORDINGS REPORTS

A row of performance.csv is one figure: part, case, variant, size (events, streams, threads: what the
part varies), figure (its unit at the end of the name), value. A part that runs replaces its rows.
Of several runs the best counts: what else a machine does only ever makes a run slower.
"""

import datetime
import gzip
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pages

TRACES = ["llama-1b-varlen", "llama-7b-lora-recompute", "mixtral-moe", "llama-3b-recompute"]
ALLOCATORS = ["caching", "expandable", "best-fit", "stitch", "stitch+policy=shipped",
              "stitch+policy=best", "planned", "native"]
LENGTHS = [10**4, 10**5, 10**6, 10**7]
LENGTH_ALLOCATORS = ["caching", "expandable", "best-fit", "stitch", "planned", "native"]
SNAPSHOTS = ["llama-1b-varlen", "llama-1b-varlen.s4.stacks"]
RUNS = 9
PARTS = ["replay", "import", "length", "threads", "cases"]

# Eight events a round: small and large blocks, freed in another order than asked for.
ROUND = """  alloc a 3MiB
  alloc b 1KiB
  alloc c 70MiB
  free b
  alloc d 5MiB
  free a c
  free d
"""
ROUND_EVENTS = 8


def run_fraglab(*arguments, code=(0, 1)):
    """Runs the program; gives what it printed and the seconds it took."""
    start = time.perf_counter()
    done = subprocess.run([FRAGLAB, *arguments], capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode not in code:
        sys.exit(f"{FRAGLAB} {' '.join(arguments)}: {done.stderr}")
    return done.stdout, seconds


def results(trace, allocators):
    """Results of a run by allocator, and the seconds of the whole process."""
    out, seconds = run_fraglab("--threads", "1", "run", "--quiet", "--trace", str(trace),
                               "--alloc", ",".join(allocators), "--json", "-")
    found = json.loads(out)
    return found if isinstance(found, list) else [found], seconds


def replay(row):
    for trace in TRACES:
        best = {}
        for _ in range(RUNS):
            found, _ = results(f"traces/{trace}.json.zst", ALLOCATORS)
            for allocator, result in zip(ALLOCATORS, found):
                rate = result["wall"]["events_per_second"]
                best[allocator] = max(rate, best.get(allocator, 0))
                events = result["trace"]["events"]
        for allocator, rate in best.items():
            row(trace, allocator, events, "events_per_second", round(rate))


def imports(row):
    for trace in TRACES[:1] + TRACES[3:]:
        out = subprocess.check_output([WORKLOADS, "--time", "30", f"native/{trace}"], text=True)
        least, _, events, size = out.split()
        row(trace, "native JSON", int(events), "bytes_per_second", round(int(size) / float(least)))
        row(trace, "native JSON", int(events), "ns_per_event",
            round(float(least) * 1e9 / int(events), 1))
    for name in SNAPSHOTS:
        packed = RECORDINGS / f"{name}.pickle.gz"
        if not packed.exists():
            print(f"left out: no recording {packed}", file=sys.stderr)
            continue
        plain = SCRATCH / f"{name}.pickle"
        with gzip.open(packed) as source, open(plain, "wb") as target:
            shutil.copyfileobj(source, target)
        size = plain.stat().st_size
        readers = {"fraglab": [IMPORT, "--once", str(plain)],
                   "CPython": [sys.executable, __file__, "unpickle", str(plain)]}
        for reader, command in readers.items():
            seconds, peaks = [], []
            for _ in range(3):
                out = subprocess.check_output(command, text=True)
                seconds.append(float(re.search(r"([\d.]+) s ", out)[1]))
                peaks.append(float(re.search(r"peak RSS (\d+) MB", out)[1]) * 1e6)
            row(name, reader, size, "seconds", min(seconds))
            row(name, reader, size, "bytes_per_second", round(size / min(seconds)))
            row(name, reader, size, "peak_rss_bytes", round(min(peaks)))


def unpickle(path):
    """What CPython takes for a snapshot, in the words of benches/import.rs."""
    import pickle

    start = time.perf_counter()
    with open(path, "rb") as file:
        # A recording of ours; pickles of others are not to be loaded so.
        snapshot = pickle.load(file)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"CPython  {seconds:.3f} s  peak RSS {peak / 1e6:.0f} MB", flush=True)
    # Taking the objects apart is not reading them.
    os._exit(0 if snapshot else 1)


def length(row):
    for events in LENGTHS:
        trace = SCRATCH / f"length-{events}.txt"
        trace.write_text(f"repeat {events // ROUND_EVENTS}\n{ROUND}end\n")
        for allocator in LENGTH_ALLOCATORS:
            rates, walls, peaks = [], [], []
            for _ in range(3):
                found, seconds = results(trace, [allocator])
                wall = found[0]["wall"]
                rates.append(wall["events_per_second"])
                peaks.append(wall["peak_rss_bytes"])
                walls.append(seconds)
            row("rounds", allocator, events, "events_per_second", round(max(rates)))
            row("rounds", allocator, events, "process_seconds", round(min(walls), 4))
            row("rounds", allocator, events, "peak_rss_bytes", min(peaks))


def threads(row):
    traces = sorted(str(path) for path in Path("traces").glob("*.json.zst"))
    allocators = "caching,expandable,best-fit,native"
    cells = len(traces) * len(allocators.split(","))
    description = SCRATCH / "throughput.toml"
    files = ", ".join(json.dumps(str(Path(path).resolve())) for path in traces)
    names = ", ".join(json.dumps(name) for name in allocators.split(","))
    description.write_text(
        'name = "throughput"\ntitle = "Throughput"\ndate = "2026-12-01"\n'
        f"traces = [{files}]\nallocators = [{names}]\n")
    for count in ["1", "2"]:
        compares, experiments = [], []
        for _ in range(5):
            _, seconds = run_fraglab("--threads", count, "compare", "--quiet", "--alloc",
                                     allocators, "--capacity", "auto", *traces)
            compares.append(seconds)
            _, seconds = run_fraglab("--threads", count, "experiment", "--quiet", "--fresh",
                                     str(description), "-o", str(SCRATCH / "out"))
            experiments.append(seconds)
        row("compare, smallest capacities", f"{cells} cells", int(count), "seconds",
            round(min(compares), 4))
        row("experiment", f"{cells} cells", int(count), "cells_per_second",
            round(cells / min(experiments), 1))


def case_refusals(n):
    """Each request is refused when 30 GiB of pages are mapped for it, which go back."""
    return f"capacity 80GiB\nalloc a 50GiB\nrepeat {n}\n  alloc x 45GiB\n  free x\nend\n"


def case_streams(n):
    """Every stream uses memory, then every stream is refused."""
    used = (f"alloc s{i} 1KiB stream={i}\nfree s{i}\n" for i in range(n))
    refused = (f"alloc t{i} 2GiB stream={i}\n" for i in range(n))
    return "capacity 1GiB\n" + "".join(used) + "".join(refused)


def case_steps(n):
    """Steps of ten events."""
    allocs = "".join(f"alloc a{i} {i + 1}MiB\n" for i in range(5))
    frees = "free a0 a1 a2 a3 a4\n"
    step = "mark step{0}.forward\n" + allocs + "mark step{0}.backward\n" + frees
    return "".join(step.format(i) for i in range(n))


def case_deferred(n):
    """A pool is deleted while its blocks and as many others are in use by another stream."""
    pool = "".join(f"alloc a{i} 1MiB\n" for i in range(n))
    others = "".join(f"alloc b{i} 1KiB\n" for i in range(n))
    defers = "".join(f"defer b{i} a{i}\n" for i in range(n))
    return f"pool enter p\n{pool}pool leave p\n{others}{defers}pool delete p\n"


CASES = {
    "refusals": (case_refusals, "expandable", [1000, 2000, 4000]),
    "streams": (case_streams, "caching", [1250, 2500, 5000]),
    "streams ": (case_streams, "stitch", [1250, 2500, 5000]),
    "steps": (case_steps, "planned", [5000, 10000, 20000]),
    "deferred": (case_deferred, "caching", [5000, 10000, 20000]),
}


def cases(row):
    for name, (text, allocator, sizes) in CASES.items():
        for size in sizes:
            trace = SCRATCH / "case.txt"
            trace.write_text(text(size))
            seconds = min(results(trace, [allocator])[0][0]["wall"]["seconds"] for _ in range(3))
            row(name.strip(), allocator, size, "seconds", round(seconds, 5))


def processor():
    """The processor by its own name."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*: (.*)", text)
    return model[1] if model else platform.machine()


def machine(row):
    rustc = subprocess.check_output(["rustc", "--version"], text=True).split()[1]
    facts = {"date": datetime.date.today().isoformat(), "cores": os.cpu_count(),
             "processor": processor(), "rustc": rustc,
             "load": round(os.getloadavg()[0], 1)}
    for fact, value in facts.items():
        row(fact, "", "", "", value)


MEASURES = {"replay": replay, "import": imports, "length": length, "threads": threads,
            "cases": cases}


def measure(part, path):
    """Replaces the rows of the part."""
    rows = [row for row in pages.read(path)] if path.exists() else []
    kept = [row for row in rows if row["part"] not in (part, f"{part} machine")]
    head = ["part", "case", "variant", "size", "figure", "value"]

    def into(name):
        return lambda *fields: kept.append(dict(zip(head, (name, *fields))))

    machine(into(f"{part} machine"))
    MEASURES[part](into(part))
    order = {name: at for at, name in enumerate(PARTS)}
    kept.sort(key=lambda row: order[row["part"].split()[0]])
    pages.write(path, [{k: "" if v is None else v for k, v in row.items()} for row in kept])


def page(reports):
    rows = pages.read(reports / "performance.csv")

    def value(part, case, variant, size, figure):
        for row in rows:
            if (row["part"], row["case"], row["figure"]) == (part, case, figure):
                if variant in (None, row["variant"]) and size in (None, row["size"]):
                    return row["value"]
        return None

    def shown(number, form):
        return "–" if number is None else form(number)

    def rate(number):
        return shown(number, lambda it: f"{it / 1e6:.1f}")

    def measured_on(part):
        fact = lambda name: value(f"{part} machine", name, None, None, None)
        if fact("date") is None:
            return "Not measured yet."
        return (f"Measured on {fact('date')}: {fact('cores')} cores of {fact('processor')}, "
                f"rustc {fact('rustc')}, load when it began {fact('load')}.")

    def sizes(part, case, variant):
        found = {row["size"] for row in rows
                 if (row["part"], row["case"], row["variant"]) == (part, case, variant)}
        return sorted(found)

    def replay_table():
        lines = []
        for trace in TRACES:
            events = next((row["size"] for row in rows
                           if (row["part"], row["case"]) == ("replay", trace)), None)
            rates = [value("replay", trace, name, None, "events_per_second")
                     for name in ALLOCATORS]
            lines.append([trace, shown(events, "{:,}".format), *map(rate, rates)])
        return pages.table(["trace", "events", *ALLOCATORS], lines)

    def native_table():
        lines = []
        for row in rows:
            if (row["part"], row["figure"]) == ("import", "ns_per_event"):
                speed = value("import", row["case"], "native JSON", None, "bytes_per_second")
                lines.append([row["case"], f"{row['size']:,}", f"{speed / 1e6:.0f}",
                              f"{row['value']:.0f}"])
        return pages.table(["trace", "events", "MB/s", "ns an event"], lines)

    def snapshot_table():
        lines = []
        for name in SNAPSHOTS:
            line = [name]
            for reader in ["fraglab", "CPython"]:
                get = lambda figure: value("import", name, reader, None, figure)
                line += [shown(get("seconds"), "{:.3f} s".format),
                         shown(get("bytes_per_second"), lambda it: f"{it / 1e6:.0f}"),
                         shown(get("peak_rss_bytes"), lambda it: f"{it / 1e6:.0f} MB")]
            lines.append(line)
        head = ["file", "fraglab", "MB/s", "peak memory", "CPython", "MB/s", "peak memory"]
        return pages.table(head, lines)

    def length_table(figure, form):
        lines = [[name, *(shown(value("length", "rounds", name, size, figure), form)
                          for size in LENGTHS)] for name in LENGTH_ALLOCATORS]
        return pages.table(["allocator", *(f"{size:,}" for size in LENGTHS)], lines)

    def bytes_per_event():
        peaks = [value("length", "rounds", "caching", size, "peak_rss_bytes")
                 for size in LENGTHS[-2:]]
        if None in peaks:
            return "–"
        return f"{(peaks[1] - peaks[0]) / (LENGTHS[-1] - LENGTHS[-2]):.0f}"

    def threads_table():
        lines = []
        for case, figure in [("compare, smallest capacities", "seconds"),
                             ("experiment", "cells_per_second")]:
            one, two = (value("threads", case, None, count, figure) for count in (1, 2))
            if None in (one, two):
                continue
            gain = one / two if figure == "seconds" else two / one
            unit = "s" if figure == "seconds" else "cells/s"
            lines.append([case, f"{one:.2f} {unit}", f"{two:.2f} {unit}", f"{gain:.2f}"])
        return pages.table(["work", "1 thread", "2 threads", "gain"], lines)

    def cases_table():
        lines = []
        for name, (_, allocator, _) in CASES.items():
            name = name.strip()
            found = sizes("cases", name, allocator)
            seconds = [value("cases", name, allocator, size, "seconds") for size in found]
            if len(found) != 3:
                continue
            cells = [f"{size:,}: {spent:.3f} s" for size, spent in zip(found, seconds)]
            lines.append([name, allocator, *cells])
        return pages.table(["case", "allocator", "n", "2n", "4n"], lines)

    def instructions_table():
        counted = pages.read(Path("benches/instructions.csv"))
        lines = [[row["workload"], f"{row['instructions']:,}"] for row in counted]
        return pages.table(["workload", "instructions"], lines)

    pages.fill("performance", reports, dict(globals(), **locals()))


def main():
    global FRAGLAB, WORKLOADS, IMPORT, RECORDINGS, SCRATCH
    if sys.argv[1] == "unpickle":
        return unpickle(sys.argv[2])
    part, FRAGLAB, WORKLOADS, IMPORT, recordings, reports = sys.argv[1:]
    RECORDINGS, reports = Path(recordings), Path(reports)
    parts = PARTS if part == "all" else [] if part == "page" else [part]
    if any(name not in PARTS for name in parts):
        sys.exit(f"performance.py: no part {part}; there are {', '.join(PARTS)}, all, page")
    with tempfile.TemporaryDirectory() as scratch:
        SCRATCH = Path(scratch)
        for name in parts:
            measure(name, reports / "performance.csv")
    page(reports)


main()
