"""Reports on planning from the results that planning.sh made.

    python3 experiments/planning.py packing RESULTS_DIR REPORTS_DIR      planning*.csv
    python3 experiments/planning.py allocators RESULTS_DIR REPORTS_DIR   planned*.csv
    python3 experiments/planning.py pages REPORTS_DIR                    the pages, from these CSV files

RESULTS_DIR holds what `fraglab plan` and `fraglab compare` wrote. What a clock measured goes to
*_times.csv, so that all else is the same in every run. The pages are the templates
experiments/*.md.in with every {{expression}} replaced by what it gives here, so that no measured
figure is typed by hand.
"""

import csv
import json
import re
import statistics
import sys
from pathlib import Path

from pages import GIB, bare, fill, gib, names, percent, read, table, write

REPORTS = Path(sys.argv[-1])
CAPACITY = 2**20

# MiniMalloc 9f5cf81 (g++ 12.2, optimised) told the capacity of 1048576 bytes: CPU seconds, measured
# by us on a two-core machine of the same make, before and apart from the runs here.
MINIMALLOC = {"A": 4.92, "B": 3.74, "C": 0.71, "D": 2.78, "E": 3.53, "F": 4.98, "G": 1.07}
MINIMALLOC |= {"H": 1.52, "I": 3.16, "J": 0.92, "K": 0.61}

# CPU seconds and MB that were aimed at for synthetic problems of so many blocks.
TARGETS = {5: (0.5, 100), 6: (3, 512), 7: (60, 6000)}


def cpu(text):
    """User and system seconds, as bash's `time` gives them."""
    return sum(map(float, text.split()))


# From results to CSV files.


def packing(results):
    """planning.csv and planning_times.csv: a row a problem and setting."""
    rows, times = [], []
    for line in (results / "packing.tsv").read_text().splitlines():
        file, kind, streams, work, runs, took = line.split("\t")
        loaded = json.loads((results / file).read_text())
        loaded = loaded if isinstance(loaded, list) else [loaded]
        runs = int(runs)
        for result in loaded[:1] if runs > 1 else loaded:
            key = {
                "set": kind,
                "problem": result["source"]["name"],
                "planner": result["planner"],
                "streams": streams,
                "capacity_bytes": (result["capacity"] or {}).get("capacity_bytes", ""),
                "work_max_units": int(work),
            }
            names = ["buffers", "height_bytes", "lower_bound_bytes", "proven", "full_span_bytes"]
            row = key | {name: result[name] for name in names}
            row["proven"] = str(row["proven"]).lower()
            row["work_units"] = result["wall"]["work_units"]
            row["found_by"] = "; ".join(pool["found_by"] for pool in result["pools"])
            rows.append(row)
            # The program counts processor time in hundredths of a second: of many runs of a quick
            # problem it is that of the process, reading the file included.
            one = result["wall"]["cpu_seconds"]
            seconds = [result["wall"]["seconds"] for result in loaded] if runs > 1 else None
            measured = {
                "runs": runs,
                "seconds": min(seconds) if seconds else result["wall"]["seconds"],
                "cpu_seconds": round(cpu(took) / runs, 6) if runs > 1 else round(one, 2),
                "peak_rss_bytes": result["wall"]["peak_rss_bytes"],
            }
            times.append(key | measured)
    write(REPORTS / "planning.csv", rows)
    write(REPORTS / "planning_times.csv", times)


COUNTERS = ["planned", "online", "mismatches", "overlaps", "resyncs", "replans", "device_syncs"]
COUNTERS += ["alloc_retries", "fallback_bytes_peak"]


def counts(result):
    """What a CSV of `compare` lacks: requests by where they went, and the calls of later steps."""
    plan = result.get("plan") or {}
    steps = [row for row in result["time"]["steps"] if re.fullmatch(r"step\d+", row["name"])]
    return {
        "trace": result["trace"]["name"],
        "allocator": plain(result["allocator"]["name"]),
        "allocs": result["trace"]["allocs"],
        "streams": result["trace"]["streams"],
        "history_share": result["trace"]["history_share"],
        "steps": len(steps),
        "profile": plan.get("source", ""),
        "planned_bytes": plan.get("planned_bytes", ""),
        "plan_bound_bytes": plan.get("lower_bound_bytes", ""),
        **{name: result["counters"].get(name, "") for name in COUNTERS},
        "later_calls": sum(row["calls"] for row in steps[1:]),
    }


def plain(allocator):
    """Its name, a file in it without folder and ending."""
    return re.sub(r"trace=(?:.*/)?(.+?)\.pickle\.gz", r"trace=\1", allocator)


def loaded(results, name):
    return json.loads((results / f"{name}.json").read_text())


def allocators(results):
    """planned.csv and planned_counts.csv, planned_other.csv, planned_times.csv."""
    rows = {}
    for name in ("planned", "stalloc"):
        with open(results / f"{name}.csv", newline="") as file:
            for row in csv.DictReader(file):
                of_trace = rows.setdefault(row["trace"], {})
                # `caching` is in both, to compare with.
                of_trace.setdefault(row["allocator"], row)
    write(REPORTS / "planned.csv", [row for of_trace in rows.values() for row in of_trace.values()])
    ran = {}
    for result in (result for name in ("planned", "stalloc") for result in loaded(results, name)):
        row = counts(result)
        ran.setdefault((row["trace"], row["allocator"]), row)
    write(REPORTS / "planned_counts.csv", sorted(ran.values(), key=lambda row: list(rows).index(row["trace"])))
    compared = [line.split("\t") for line in (results / "compared.tsv").read_text().splitlines()]
    other = []
    for name in (name for name, _ in compared if name.startswith("other.")):
        with open(results / f"{name}.csv", newline="") as file:
            peaks = list(csv.DictReader(file))
        for row, result in zip(peaks, loaded(results, name)):
            keep = ["reserved_bytes_peak", "excess_bytes", "waste_removed", "device_calls"]
            other.append(counts(result) | {"status": row["status"]} | {k: row[k] for k in keep})
    write(REPORTS / "planned_other.csv", other)
    times = []
    for name, took in compared:
        if name.startswith("time."):
            ran = loaded(results, name)
            allocs = sum(result["trace"]["allocs"] for result in ran)
            times.append({"allocator": name.removeprefix("time."), "traces": len(ran)})
            times[-1] |= {"allocs": allocs, "cpu_seconds": round(cpu(took), 3)}
    write(REPORTS / "planned_times.csv", times)


# What both pages use.


def seconds(value):
    if value == 0:
        return "< 0.01"
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def yes(row):
    return "yes" if row["proven"] == "true" else "no"


# Packing.


def packed(kind, planner="best", streams="together", capacity=None):
    """Rows of a set by problem, with their times; of several runs the one with least work."""
    found = {}
    for row in PACKED:
        key = (row["set"], row["planner"], row["streams"], row["capacity_bytes"])
        if key == (kind, planner, streams, capacity):
            known = found.setdefault(row["problem"], row)
            if row["work_max_units"] < known["work_max_units"]:
                found[row["problem"]] = row
    return found


def gap(row):
    return row["height_bytes"] / row["lower_bound_bytes"] - 1


def gap_above(row):
    """The same without what lives throughout, which no plan can move."""
    full = row["full_span_bytes"]
    bound = row["lower_bound_bytes"] - full
    return (row["height_bytes"] - full) / bound - 1 if bound else 0.0


def small(share):
    """A share in percent; of a tiny one how tiny it is."""
    if share == 0:
        return "0"
    if share < 1e-6:
        return "< 0.0001 %"
    return percent(share, 4 if share < 0.001 else 2)


def letter(problem):
    return problem.split(".")[0]


def told(instance):
    return TOLD[f"{instance}.{CAPACITY}"]


def untold(instance):
    return UNTOLD[f"{instance}.{CAPACITY}"]


def total_cpu(rows, without=""):
    return sum(row["cpu_seconds"] for key, row in rows.items() if letter(key) not in without)


def slowest(rows, without=""):
    return max(row["cpu_seconds"] for key, row in rows.items() if letter(key) not in without)


def table_minimalloc():
    rows = []
    for instance, peer in MINIMALLOC.items():
        at, free = told(instance), untold(instance)
        line = [instance, f"{at['buffers']}", f"{at['lower_bound_bytes']:,}"]
        line += [f"{at['height_bytes']:,}", f"{1000 * at['cpu_seconds']:.1f}"]
        line += [f"{peer:.2f}", f"{peer / at['cpu_seconds']:,.0f}"]
        line += [f"{free['height_bytes']:,}", f"{1 + gap(free):.4f}", yes(free)]
        rows.append(line + [seconds(free["cpu_seconds"])])
    both = [total_cpu(TOLD), sum(MINIMALLOC.values())]
    line = ["all", "", "", "", f"{1000 * both[0]:.1f}", f"{both[1]:.2f}"]
    rows.append(line + [f"{both[1] / both[0]:,.0f}", "", "", "", seconds(total_cpu(UNTOLD))])
    head = ["", "buffers", "bound", "height at 1,048,576", "CPU ms", "MiniMalloc, CPU s"]
    head += ["times as fast", "height, not told", "of the bound", "proven", "CPU s"]
    return table(head, rows)


def magnitude(row):
    """5 for 1e5 blocks, nearly."""
    return round(len(str(row["buffers"])) - 1)


def table_synthetic():
    rows = []
    for shape, row in SYNTHETIC.items():
        line = [f"`{shape}`", f"{row['buffers']:,}", gib(row["lower_bound_bytes"])]
        line += [small(gap(row)), small(gap_above(row)), yes(row)]
        line += [seconds(row["cpu_seconds"]), f"{row['peak_rss_bytes'] / 1e6:.0f}"]
        rows.append(line + [row["found_by"]])
    head = ["shape", "blocks", "bound, GiB", "above the bound", "without what lives throughout"]
    return table(head + ["proven", "CPU s", "peak MB", "found by"], rows)


def of_size(exponent):
    return [row for row in SYNTHETIC.values() if magnitude(row) == exponent]


def misses(exponent):
    """Problems of a size beyond a target: gap, time or memory."""
    cpu_seconds, megabytes = TARGETS[exponent]
    return [
        row["problem"]
        for row in of_size(exponent)
        if gap(row) > 0.0005
        or row["cpu_seconds"] > cpu_seconds
        or row["peak_rss_bytes"] > 1e6 * megabytes
    ]


def table_targets():
    rows = []
    for exponent, (cpu_seconds, megabytes) in TARGETS.items():
        found = of_size(exponent)
        worst = lambda show: max(map(show, found))
        line = [f"1e{exponent}", f"1.0005 in {cpu_seconds} s, {megabytes:,} MB"]
        line += [str(len(found)), str(sum(1 for row in found if gap(row) == 0))]
        line += [f"{1 + worst(gap):.6f}", seconds(worst(lambda row: row["cpu_seconds"]))]
        line += [f"{worst(lambda row: row['peak_rss_bytes']) / 1e6:.0f}"]
        rows.append(line + [", ".join(f"`{name}`" for name in misses(exponent)) or "none"])
    head = ["blocks", "aimed at", "problems", "at the bound", "worst ratio", "most CPU s"]
    return table(head + ["most MB", "missed"], rows)


def longer():
    """The problem that got ten times the work."""
    rows = [row for row in PACKED if row["set"] == "synthetic"]
    name = "moe:100000"
    return max((row for row in rows if row["problem"] == name), key=lambda r: r["work_max_units"])


def table_recordings():
    rows = []
    for trace, row in TOGETHER.items():
        line = [trace.removesuffix(".rank0"), f"{row['buffers']:,}", gib(row["lower_bound_bytes"])]
        line += [small(gap(row)), yes(row), seconds(row["cpu_seconds"])]
        for other in (APART[trace], LARGEST[trace]):
            more = other["height_bytes"] / row["height_bytes"] - 1
            line.append(f"{gib(other['height_bytes'])} ({'+' if more else ''}{small(more)})")
        rows.append(line)
    head = ["recording", "blocks", "bound, GiB", "above it", "proven", "CPU s"]
    return table(head + ["streams apart, GiB", "largest first, GiB"], rows)


def at_bound(rows, traces=None):
    return [trace for trace in traces or rows if gap(rows[trace]) == 0]


def most_above():
    """Bytes that the packing of a job is above its bound, at most."""
    return max(TOGETHER[t]["height_bytes"] - TOGETHER[t]["lower_bound_bytes"] for t in jobs(TOGETHER))


def jobs(rows):
    return [trace for trace in rows if not trace.startswith("random")]


def apart_more():
    """Recordings whose streams cost memory when kept apart, by how much."""
    more = lambda trace: APART[trace]["height_bytes"] / TOGETHER[trace]["height_bytes"] - 1
    found = [(more(trace), trace) for trace in jobs(TOGETHER)]
    found = sorted((it for it in found if it[0] > 0.0001), reverse=True)
    return ", ".join(f"{bare(trace)} (+{small(share)})" for share, trace in found) or "none"


def worst_largest(count):
    shares = sorted(((gap(LARGEST[t]), t) for t in jobs(LARGEST)), reverse=True)[:count]
    return ", ".join(f"{bare(trace)} (+{percent(share)})" for share, trace in shares)


def long_run(instance):
    """A sentence on a run of an hour, if it has been made."""
    for row in read(REPORTS / "planning_long.csv") if (REPORTS / "planning_long.csv").exists() else []:
        if row["instance"] == instance:
            ratio = row["height_bytes"] / row["lower_bound_bytes"]
            end = "proven to be the least" if row["proven"] == "true" else "not proven"
            return (
                f"{row['height_bytes']:,} bytes, {ratio:.4f} of the bound, {end}, "
                f"after {row['cpu_seconds']:,.0f} CPU seconds"
            )
    return "not made yet"


# Allocators.

ALLOCATORS = {
    "caching": "caching",
    "expandable": "expandable",
    "best-fit": "best-fit",
    "paper": "stitch",
    "stitch": "stitch+policy=best",
    "planned": "planned",
    "stalloc": "planned+mode=stalloc",
    "mended": "planned+mode=stalloc+faithful=false",
}
PLANNING = ["planned", "stalloc", "mended"]


def by_cell(rows):
    cells = {}
    for row in rows:
        cells.setdefault(row["trace"], {})[row["allocator"]] = row
    return cells


def cell(trace, name):
    """A row of planned.csv, or nothing where the allocator refused the profile."""
    return RAN[trace].get(ALLOCATORS[name])


def count(trace, name, key):
    return COUNTS[trace][ALLOCATORS[name]][key]


def ok(trace, name):
    row = cell(trace, name)
    return row is not None and row["status"] == "ok"


def removed(trace, name):
    row = cell(trace, name)
    return row["waste_removed"] if row and row["status"] == "ok" else None


def is_variable(trace):
    return trace.startswith(("llama-1b-varlen", "mixtral-moe"))


def is_default(trace):
    """PyTorch's default settings, no limit, the whole history, one rank."""
    return "." not in trace.removesuffix(".rank0")


def which(variable=None, default=None, judged=False):
    """Recordings of a kind; `judged`: those that `caching` completes, so that it has a waste."""
    keep = lambda trace: (
        (variable is None or is_variable(trace) == variable)
        and (not judged or ok(trace, "caching"))
        and (default is None or is_default(trace) == default)
    )
    return [trace for trace in RAN if keep(trace)]


def met(name, target, traces):
    return [t for t in traces if (removed(t, name) or -1.0) >= target]


def why(trace, name="planned"):
    """What the counters and the recording show of a miss."""
    row = COUNTS[trace].get(ALLOCATORS[name])
    if row is None:
        return "the profile is refused"
    reasons = []
    if row["streams"] > 1:
        reasons.append(f"{row['streams']} streams, {row['device_syncs']} waits")
    if row["profile"].startswith("1 step"):
        reasons.append("one step of profile")
    if row["history_share"] < 0.999:
        reasons.append(f"{percent(row['history_share'], 0)} of the history")
    if row["mismatches"]:
        reasons.append(f"{row['mismatches']:,} requests not as in the profile")
    if row["overlaps"]:
        reasons.append(f"{row['overlaps']:,} whose place was taken")
    if row["replans"]:
        reasons.append(f"{row['replans']} plans made anew")
    own = cell(trace, "caching")["excess_bytes"] / cell(trace, "caching")["requested_bytes_peak"]
    if own < 0.05:
        reasons.append(f"`caching` itself is only {percent(own)} above")
    if row["planned_bytes"] is not None:
        short = cell(trace, name)["requested_bytes_peak"] / row["planned_bytes"] - 1
        if short > 0.005:
            reasons.append(f"the plan is {percent(short)} below the peak that came")
    return ", ".join(reasons) or "every request is at its place: it is the plan"


def missed(name, target, traces):
    """A line a miss: what was removed, by how much memory it misses, and why."""
    lines = []
    for trace in traces:
        if trace in met(name, target, [trace]):
            continue
        share = removed(trace, name)
        if share is None:
            lines.append(f"- {bare(trace)}: {why_none(trace, name)}.")
            continue
        excess = gib(cell(trace, name)["excess_bytes"])
        text = f"- {bare(trace)}: {percent(share)}, {excess} GiB above requested"
        lines.append(f"{text}; {why(trace, name)}.")
    return "\n".join(lines) or "None."


def unjudged():
    """Recordings that `caching` does not complete, and what the others make of them."""
    traces = [trace for trace in RAN if not ok(trace, "caching")]
    completes = lambda trace: [f"`{name}`" for name in ALLOCATORS if ok(trace, name)]
    lines = [f"{bare(trace)} ({', '.join(completes(trace)) or 'none'})" for trace in traces]
    return ", ".join(lines) or "none"


def why_none(trace, name):
    row = cell(trace, name)
    if row is None:
        return "the profile is refused"
    limit = row["limit_bytes"]
    return "out of memory" + (f" under its limit of {limit / GIB:.0f} GiB" if limit else "")


def show_held(trace, name):
    row = cell(trace, name)
    if row is None:
        return "–"
    return gib(row["reserved_bytes_peak"]) + ("" if row["status"] == "ok" else " †")


def table_held(traces):
    rows = []
    for trace in traces:
        held = {n: cell(trace, n)["reserved_bytes_peak"] for n in ALLOCATORS if ok(trace, n)}
        bold = lambda n: f"**{show_held(trace, n)}**" if held.get(n) == min(held.values()) else None
        line = [trace.removesuffix(".rank0"), gib(cell(trace, "caching")["requested_bytes_peak"])]
        rows.append(line + [bold(name) or show_held(trace, name) for name in ALLOCATORS])
    return table(["recording", "requested"] + list(ALLOCATORS), rows)


def table_removed(traces):
    show = lambda share: "–" if share is None else percent(share)
    kinds = [name for name in ALLOCATORS if name != "caching"]
    rows = [
        [trace.removesuffix(".rank0")] + [show(removed(trace, name)) for name in kinds]
        for trace in traces
    ]
    return table(["recording"] + kinds, rows)


def table_counts():
    head = ["recording", "streams", "requests", "steps"]
    for name in PLANNING:
        head += [f"{name}: on line", "mismatched", "taken", "waits", "calls, later steps"]
    rows = []
    for trace in RAN:
        row = COUNTS[trace]["caching"]
        line = [trace.removesuffix(".rank0"), str(row["streams"])]
        line += [f"{row['allocs']:,}", str(row["steps"])]
        for name in PLANNING:
            keys = ["online", "mismatches", "overlaps", "device_syncs", "later_calls"]
            there = ALLOCATORS[name] in COUNTS[trace]
            line += [f"{count(trace, name, key):,}" if there else "–" for key in keys]
        rows.append(line)
    return table(head, rows)


def table_time():
    """Milliseconds of device calls, and the number of calls."""
    rows = []
    for trace in RAN:
        line = [trace.removesuffix(".rank0")]
        for name in ALLOCATORS:
            row = cell(trace, name)
            text = "–" if row is None else f"{row['allocator_device_ns'] / 1e6:,.1f}"
            line.append(text + ("" if row is None else f" ({row['device_calls']:,})"))
        rows.append(line)
    return table(["recording"] + list(ALLOCATORS), rows)


def table_other():
    rows = []
    for row in read(REPORTS / "planned_other.csv"):
        if not row["allocator"].startswith("planned"):
            continue
        source = row["allocator"].removeprefix("planned+trace=").removeprefix("planned")
        line = [bare(row["trace"]), f"`{source}`" if source else "its own first steps"]
        line += [gib(row["reserved_bytes_peak"]), percent(row["waste_removed"])]
        keys = ["online", "mismatches", "overlaps", "replans", "device_calls"]
        rows.append(line + [f"{row[key]:,}" for key in keys])
    head = ["recording", "planned from", "reserved, GiB", "waste removed", "on line"]
    return table(head + ["mismatched", "taken", "replans", "device calls"], rows)


def harmed():
    """Recordings that another's plan leaves with more than `caching` holds."""
    rows = [row for row in read(REPORTS / "planned_other.csv") if (row["waste_removed"] or 0) < 0]
    source = lambda row: row["allocator"].removeprefix("planned+trace=")
    return ", ".join(f"{bare(row['trace'])} from `{source(row)}`" for row in rows) or "none"


def table_times():
    rows = read(REPORTS / "planned_times.csv")
    base = rows[0]["cpu_seconds"] / rows[0]["allocs"]
    lines = []
    for row in rows:
        each = row["cpu_seconds"] / row["allocs"]
        line = [f"`{row['allocator']}`", str(row["traces"]), f"{row['allocs']:,}"]
        line += [f"{row['cpu_seconds']:.1f}", f"{1e3 * (each - base):.4f}"]
        lines.append(line)
    head = ["allocator", "recordings", "requests", "CPU s, reading included"]
    return table(head + ["ms a request more than `caching`"], lines)


def efficiency(trace, name, key="requested_bytes_peak"):
    """As the paper has it, of the whole run: what was allocated by what was reserved."""
    row = cell(trace, name)
    return row[key] / row["reserved_bytes_peak"] if row and row["status"] == "ok" else None


def values(show, traces):
    return [value for value in map(show, traces) if value is not None]


def spread(name, traces, key="requested_bytes_peak"):
    shares = values(lambda trace: efficiency(trace, name, key), traces)
    if not shares:
        return "–"
    least, middle, most = min(shares), statistics.median(shares), max(shares)
    return f"{100 * least:.1f} – **{100 * middle:.1f}** – {100 * most:.1f}"


def fragmentation_removed(trace, name, other):
    """1 − W / W of the other, W = reserved − allocated, the paper's measure."""
    if not (ok(trace, name) and ok(trace, other)):
        return None
    waste = lambda n: cell(trace, n)["reserved_bytes_peak"] - cell(trace, n)["allocated_bytes_peak"]
    return 1 - waste(name) / waste(other) if waste(other) > 0 else None


def middle_removed(name, other, traces):
    shares = values(lambda trace: fragmentation_removed(trace, name, other), traces)
    return percent(statistics.median(shares)) if shares else "–"


def mean_removed(name, other, traces):
    shares = values(lambda trace: fragmentation_removed(trace, name, other), traces)
    return percent(statistics.mean(shares)) if shares else "–"


def matched(name, traces):
    """Those whose every request took its planned place."""
    there = lambda trace: ALLOCATORS[name] in COUNTS[trace]
    return [t for t in traces if there(t) and count(t, name, "online") == 0 and ok(t, name)]


def order(traces):
    """Allocators by their median efficiency, best first."""
    kinds = ["stalloc", "expandable", "caching", "paper"]
    middle = lambda name: statistics.median(values(lambda t: efficiency(t, name), traces))
    shown = {"paper": "GMLake", "caching": "PyTorch", "expandable": "ES", "stalloc": "STAlloc"}
    ranked = sorted(kinds, key=middle, reverse=True)
    return " > ".join(f"{shown[name]} ({percent(middle(name))})" for name in ranked)


def recomputing(traces):
    """Jobs with activation checkpointing."""
    found = re.compile(r"recompute|deepspeed-opt-1-3b-(R|LR|RO|LRO)\b")
    return [trace for trace in traces if found.search(trace)]


def middle_excess(name, traces):
    """Reserved above requested, median of those that ran through."""
    rows = [cell(trace, name) for trace in traces if ok(trace, name)]
    shares = [row["excess_bytes"] / row["requested_bytes_peak"] for row in rows]
    return percent(statistics.median(shares), 2 if statistics.median(shares) < 0.01 else 1)


def findings():
    """Bullets: how often each aim is met."""
    regular, variable = which(variable=False, judged=True), which(variable=True, judged=True)
    lines = []
    for text, traces, aim in (
        ("Steps alike", regular, 0.95),
        ("Lengths that vary, and experts", variable, 0.80),
    ):
        counts_met = [
            f"`{name}` {len(met(name, aim, traces))}"
            for name in (*PLANNING, "stitch", "paper", "expandable")
        ]
        lines.append(
            f"- **{text}**, {len(traces)} recordings. {percent(aim, 0)} or more of the waste is gone "
            f"on so many of them: {', '.join(counts_met)}."
        )
    default = which(variable=False, default=True)
    lines.append(
        f"- **Reserved above requested**, median of the {len(default)} default jobs with steps "
        + "alike: " + ", ".join(f"`{name}` {middle_excess(name, default)}" for name in ALLOCATORS) + "."
    )
    regular = which(variable=False)
    quiet = [t for t in RAN if count(t, "planned", "later_calls") == 0]
    lines.append(
        f"- **Every request at its place** on {len(matched('planned', regular))} of {len(regular)} "
        f"recordings with steps alike (`stalloc`: {len(matched('stalloc', regular))}). From the "
        f"second step on `planned` makes no device call on {len(quiet)} of {len(RAN)}."
    )
    return "\n".join(lines)


def table_published():
    """Efficiency as published beside both definitions of ours, dense jobs and experts."""
    published = {
        "caching": ("PyTorch 2.3", "57.1 – 90.6", "82.3"),
        "expandable": ("ES", "62.4 – 93.2", "93.1"),
        "paper": ("GMLake", "45.1 – 88.1", "79.7"),
        "stalloc": ("STAlloc", "> 95 – 100", "95.7"),
    }
    dense, moe_jobs = which(variable=False, default=True), ["mixtral-moe"]
    varlen = ["llama-1b-varlen"]
    rows = []
    for name in ("caching", "expandable", "paper", "stitch", "stalloc", "mended", "planned"):
        label, dense_range, mean = published.get(name, ("–", "–", "–"))
        row = [f"`{name}`", label, dense_range, spread(name, dense)]
        row.append(spread(name, dense, "allocated_bytes_peak"))
        alone = lambda traces: efficiency(traces[0], name)
        show = lambda share: "–" if share is None else f"{100 * share:.1f}"
        rows.append(row + [mean, show(alone(moe_jobs)), show(alone(varlen))])
    head = ["allocator", "published as", "E, dense, published", "efficiency, ours"]
    head += ["utilization, ours", "E, MoE, published mean", "`mixtral-moe`", "`llama-1b-varlen`"]
    return table(head, rows)


def table_fragmentation():
    published = {"caching": ("90.3 %", "74.9 %"), "expandable": ("87.8 %", "34.0 %")}
    published["paper"] = ("93.4 %", "77.2 %")
    dense = which(variable=False, default=True)
    rows = []
    for other in published:
        row = [f"`{other}`", *published[other]]
        for name in ("stalloc", "mended", "planned"):
            row.append(f"{middle_removed(name, other, dense)} ({mean_removed(name, other, dense)})")
        for name in ("stalloc", "planned"):
            row.append(middle_removed(name, other, ["mixtral-moe"]))
        rows.append(row)
    head = ["than", "STAlloc, dense, published mean", "MoE, published mean"]
    head += ["`stalloc`, dense: median (mean)", "`mended`", "`planned`"]
    return table(head + ["`stalloc`, `mixtral-moe`", "`planned`, `mixtral-moe`"], rows)


def moe():
    """Fragmentation of the mixture of experts, by allocator."""
    kinds = ["caching", "expandable", "paper", "stalloc", "mended", "planned"]
    shares = {name: efficiency("mixtral-moe", name) for name in kinds}
    return ", ".join(f"`{n}` {percent(1 - e)}" for n, e in shares.items() if e is not None)


part = sys.argv[1]
if part == "packing":
    packing(Path(sys.argv[2]))
elif part == "allocators":
    allocators(Path(sys.argv[2]))
else:
    if (REPORTS / "planning.csv").exists():
        PACKED = [a | b for a, b in zip(read(REPORTS / "planning.csv"), read(REPORTS / "planning_times.csv"))]
        TOLD, UNTOLD = packed("minimalloc", capacity=CAPACITY), packed("minimalloc")
        SYNTHETIC = packed("synthetic")
        TOGETHER, APART = packed("recording"), packed("recording", streams="apart")
        LARGEST = packed("recording", planner="greedy-by-size")
        fill("planning", REPORTS, globals())
    if (REPORTS / "planned.csv").exists():
        RAN, COUNTS = by_cell(read(REPORTS / "planned.csv")), by_cell(read(REPORTS / "planned_counts.csv"))
        fill("planned", REPORTS, globals())
