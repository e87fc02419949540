"""Reports on stitching from the results that stitching.sh made.

    python3 experiments/stitching.py RESULTS_DIR REPORTS_DIR

RESULTS_DIR holds stitching.csv and .json, stitching_limits.csv and stitching_strategies.csv, as
`fraglab compare` writes them. REPORTS_DIR gets the CSV files, stitching_steps.csv (device time by
steps, from the JSON), and stitching.md and gmlake.md: the templates experiments/*.md.in with every
{{expression}} replaced by what it gives here, so that no figure is typed by hand.
"""

import csv
import io
import json
import re
import shutil
import statistics
import sys
from pathlib import Path

from pages import GIB, HERE, bare, fill, gib, names, number, percent, table

RESULTS, REPORTS = Path(sys.argv[1]), Path(sys.argv[2])
ALLOCATORS = ["native", "caching", "expandable", "best-fit", "paper", "shipped", "best"]
OTHERS = ["paper", "shipped", "expandable", "best-fit", "caching"]
STRATEGIES = ["N", "R", "LR", "RO", "LRO"]
COMBINED = STRATEGIES[2:]
MEASURES = {
    "reserved peak": "reserved_bytes_peak",
    "smallest capacity": "smallest_capacity_bytes",
    "device calls": "device_calls",
    "device time": "allocator_device_ns",
    "address space": "address_bytes_peak",
}


def short(allocator):
    """`stitch+policy=paper+frag_limit=32MiB` is `paper 32` here."""
    words = allocator.removeprefix("stitch+policy=").split("+")
    words = [word.removeprefix("frag_limit=").removesuffix("MiB") for word in words]
    return " ".join(words).replace(" re_alloc=false", "").replace("re_alloc=true", "re_alloc")


def read(name):
    """Rows of a CSV by trace and allocator, numbers as such, empty fields as None."""
    table = {}
    with open(RESULTS / name, newline="") as file:
        for row in csv.DictReader(file):
            cell = {key: number(value) for key, value in row.items()}
            table.setdefault(row["trace"], {})[short(row["allocator"])] = cell
    return table


def is_step(name):
    return re.fullmatch(r"step\d+", name) is not None


def steps_of(result):
    """Device time before the second step, and in the steps from the second on."""
    steps = result["time"]["steps"]
    names = [step["name"] for step in steps if is_step(step["name"])]
    later = [step for step in steps if step["name"] in names[1:]]
    begin = [step for step in steps if step["name"] == "before" or step["name"] in names[:1]]
    if not later:
        return None
    total = lambda some, key: sum(step[key] for step in some)
    return {
        "trace": result["trace"]["name"],
        "allocator": result["allocator"]["name"],
        "later_steps": len(later),
        "begin_device_ns": total(begin, "allocator_device_ns"),
        "later_device_ns": total(later, "allocator_device_ns"),
        "later_simulated_ns": total(later, "simulated_ns"),
        "later_calls": total(later, "calls"),
        "last_device_ns": later[-1]["allocator_device_ns"],
        "last_calls": later[-1]["calls"],
    }


def write_steps():
    """stitching_steps.csv; its rows by trace and allocator."""
    with open(RESULTS / "stitching.json") as file:
        rows = [row for row in map(steps_of, json.load(file)) if row]
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    (REPORTS / "stitching_steps.csv").write_text(text.getvalue())
    table = {}
    for row in rows:
        table.setdefault(row["trace"], {})[short(row["allocator"])] = row
    return table


ALL = read("stitching.csv")
LIMITS = read("stitching_limits.csv")
STRATEGY = read("stitching_strategies.csv")
STEPS = write_steps()
JOBS = [trace for trace in ALL if "." not in trace.removesuffix(".rank0")]
REST = [trace for trace in ALL if trace not in JOBS]
LIMIT_NAMES = ["shipped", "shipped 32", "shipped 128 re_alloc", "shipped 32 re_alloc"]
LIMIT_NAMES += ["paper", "paper 32", "best"]


# Figures.


def cell(trace, allocator):
    trace = trace if trace in ALL else f"{trace}.rank0"
    for table in (ALL, LIMITS, STRATEGY):
        if allocator in table.get(trace, {}):
            return table[trace][allocator]
    raise KeyError(f"{trace} {allocator}")


def ok(trace, allocator):
    return cell(trace, allocator)["status"] == "ok"


def ms(value):
    """Milliseconds with two or three significant digits."""
    value /= 1e6
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def held(trace, allocator):
    """Reserved peak in GiB."""
    return gib(cell(trace, allocator)["reserved_bytes_peak"])


def requested(trace):
    return gib(cell(trace, "caching")["requested_bytes_peak"])


def over(trace, allocator, key="reserved_bytes_peak"):
    """A peak above the requested one, as a share."""
    row = cell(trace, allocator)
    return row[key] / row["requested_bytes_peak"] - 1


def less(trace, allocator, other):
    """By how many bytes the reserved peak of `allocator` is below that of `other`."""
    peaks = (cell(trace, name)["reserved_bytes_peak"] for name in (other, allocator))
    return next(peaks) - next(peaks)


def larger(allocator, other, traces=None):
    """Jobs on which `allocator` holds more than `other`: names and both peaks."""
    return [
        f"{bare(trace)} ({held(trace, allocator)} against {held(trace, other)})"
        for trace in traces or JOBS
        if ok(trace, allocator) and ok(trace, other) and less(trace, allocator, other) < 0
    ]


def count(condition, traces=None):
    return sum(1 for trace in traces or JOBS if condition(trace))


def median_over(allocator, key="reserved_bytes_peak"):
    return percent(statistics.median(over(trace, allocator, key) for trace in JOBS))


def worst_over(allocator, key="reserved_bytes_peak"):
    trace = max(JOBS, key=lambda trace: over(trace, allocator, key))
    return f"{percent(over(trace, allocator, key))} ({bare(trace)})"


def total(key, allocator, table=None):
    return sum((table or ALL)[trace][allocator][key] for trace in JOBS if trace in (table or ALL))


def times(key, allocator, other):
    """How many times as much of something `allocator` needs as `other`, all jobs together."""
    return f"{total(key, allocator) / total(key, other):.1f}"


def later_ms(trace, allocator):
    """Device time of a step from the second on, mean."""
    trace = trace if trace in STEPS else f"{trace}.rank0"
    if trace not in STEPS:
        return None
    row = STEPS[trace][allocator]
    return row["later_device_ns"] / row["later_steps"]


def later_share(trace, allocator):
    row = STEPS[trace][allocator]
    return row["later_device_ns"] / row["later_simulated_ns"]


def later_shares(allocator):
    """Median and largest share of the later steps' time."""
    shares = {trace: later_share(trace, allocator) for trace in JOBS if trace in STEPS}
    worst = max(shares, key=shares.get)
    middle = percent(statistics.median(shares.values()), 2)
    return middle, f"{percent(shares[worst])} ({bare(worst)})"


def steps_jobs():
    return count(lambda trace: trace in STEPS)


def begin_share(allocator):
    """Share of the device time that falls before the second step, all jobs with steps."""
    begin = total("begin_device_ns", allocator, STEPS)
    return percent(begin / (begin + total("later_device_ns", allocator, STEPS)), 0)


def quiet(allocator):
    """Jobs whose last step makes no device call."""
    return [t for t in JOBS if t in STEPS and STEPS[t][allocator]["last_calls"] == 0]


def rounding(trace, allocator):
    """What rounding adds to the requested peak."""
    return percent(over(trace, allocator, "allocated_bytes_peak"))


def equal(allocator, other):
    """Jobs on which both hold the same."""
    return [trace for trace in JOBS if less(trace, allocator, other) == 0]


def gap(trace, allocator, other="best"):
    """What `allocator` holds more than `other`, as a share of the requested peak."""
    return less(trace, other, allocator) / cell(trace, other)["requested_bytes_peak"]


def close(allocator, share):
    return [trace for trace in JOBS if gap(trace, allocator) <= share]


def near(allocator, other, share):
    return [trace for trace in JOBS if gap(trace, allocator, other) <= share]


def gaps(allocator, number):
    """The jobs on which `allocator` holds most above `best`."""
    first = sorted(JOBS, key=lambda trace: -gap(trace, allocator))[:number]
    peaks = lambda trace: f"{held(trace, allocator)} against {held(trace, 'best')}"
    return ", ".join(f"{bare(trace)} ({peaks(trace)})" for trace in first)


def ratio_mappings(other):
    return f"{total('mappings_peak', other) / total('mappings_peak', 'best'):.0f}"


def completes(allocator, other):
    """Recordings of jobs that one completes and the other does not."""
    jobs = [trace for trace in REST if not trace.startswith("random")]
    return names([trace for trace in jobs if ok(trace, allocator) and not ok(trace, other)])


def random_ok(allocator):
    return [trace for trace in REST if trace.startswith("random") and ok(trace, allocator)]


def non_monotone():
    """Allocators with the recordings on which they failed on more than their smallest capacity."""
    seen = {
        name: [trace for trace in ALL if cell(trace, name)["non_monotone"] == "true"]
        for name in ALLOCATORS
    }
    return "; ".join(f"`{name}` on {names(traces)}" for name, traces in seen.items() if traces)


# Tables.


def by_allocator(traces, show, key=None, first=None):
    """A row a recording, a column an allocator; the least but native's stands bold."""
    rows = []
    for trace in traces:
        values = {name: cell(trace, name).get(key) for name in ALLOCATORS[1:] if ok(trace, name)}
        values = [value for value in values.values() if value is not None]
        row = [trace.removesuffix(".rank0")] + ([first(trace)] if first else [])
        for name in ALLOCATORS:
            text = show(trace, name)
            least = values and name != "native" and cell(trace, name).get(key) == min(values)
            row.append(f"**{text}**" if key and least and ok(trace, name) else text)
        rows.append(row)
    return rows


def table_reserved(traces):
    def show(trace, name):
        row = cell(trace, name)
        refused = "" if ok(trace, name) else " †"
        return f"{gib(row['reserved_bytes_peak'])} ({100 * row['utilization']:.0f}){refused}"

    head = ["recording", "requested"] + ALLOCATORS
    return table(head, by_allocator(traces, show, "reserved_bytes_peak", requested))


def table_calls():
    show = lambda trace, name: f"{cell(trace, name)['device_calls']:,}"
    return table(["recording"] + ALLOCATORS, by_allocator(ALL, show))


def table_time():
    def show(trace, name):
        later = later_ms(trace, name)
        later = "" if later is None else f" ({ms(later)})"
        return ms(cell(trace, name)["allocator_device_ns"]) + later

    return table(["recording"] + ALLOCATORS, by_allocator(ALL, show))


def table_capacity():
    def show(trace, name):
        row = cell(trace, name)
        mark = " ‡" if row["non_monotone"] == "true" else ""
        return gib(row["smallest_capacity_bytes"]) + mark

    key = "smallest_capacity_bytes"
    return table(["recording", "requested"] + ALLOCATORS, by_allocator(ALL, show, key, requested))


def table_address():
    columns = ["expandable", "best-fit", "paper", "shipped", "best"]
    rows = []
    for trace in JOBS:
        cells = [cell(trace, name) for name in columns]
        show = lambda row: f"{row['address_bytes_peak'] / GIB:.0f} ({row['mappings_peak']:,})"
        texts = [show(row) for row in cells]
        rows.append([trace.removesuffix(".rank0"), requested(trace)] + texts)
    return table(["recording", "requested"] + columns, rows)


def against(other, key, traces):
    """Recordings where `best` needs less, the same and more than `other`, with both figures.
    Those that either did not complete, or without a figure, are left out."""
    lower, same, higher = [], [], []
    for trace in traces:
        mine, theirs = (cell(trace, name)[key] for name in ("best", other))
        if key != "smallest_capacity_bytes" and not (ok(trace, "best") and ok(trace, other)):
            continue
        if mine is None or theirs is None:
            continue
        group = lower if mine < theirs else same if mine == theirs else higher
        group.append((trace, mine, theirs))
    return lower, same, higher


def comparable(key, other):
    """Addresses are those of virtual memory calls: `caching` makes none."""
    return not (key == "address_bytes_peak" and other == "caching")


def table_dominance(traces):
    rows = []
    for measure, key in MEASURES.items():
        row = [measure]
        for other in OTHERS:
            groups = against(other, key, traces)
            counts = " / ".join(str(len(group)) for group in groups)
            row.append(counts if comparable(key, other) else "–")
        rows.append(row)
    return table(["best against"] + OTHERS, rows)


def list_higher():
    """Every recording on which `best` needs more; the exceptions where that is most of them."""
    lines = []
    for measure, key in MEASURES.items():
        for other in OTHERS:
            lower, same, higher = against(other, key, ALL)
            if not higher or not comparable(key, other):
                continue
            if len(higher) > 2 * (len(lower) + len(same)) and key != "address_bytes_peak":
                rest = [trace for trace, _, _ in lower + same]
                text = f"all {len(higher)}" + (f" but {names(rest)}" if rest else "")
            else:
                text = ", ".join(f"{bare(t)} {excess(a, b)}" for t, a, b in higher)
            lines.append(f"- {measure}, than `{other}`: {text}.")
    return "\n".join(lines)


def excess(mine, theirs):
    share = mine / theirs - 1
    return f"+{percent(share, 2 if share < 0.01 else 0)}"


# GMLake's own figures beside ours.


def job(case):
    return f"deepspeed-opt-1-3b-{case}.rank0"


def published():
    with open(HERE / "gmlake_published.csv", newline="") as file:
        return {row["case"]: {k: number(v) for k, v in row.items()} for row in csv.DictReader(file)}


PUBLISHED = published()


def ours(case, allocator):
    return STRATEGY[job(case)][allocator]


def saved(case, allocator):
    peaks = [ours(case, name)["reserved_bytes_peak"] for name in ("caching", allocator)]
    return peaks[0] - peaks[1]


def utilization(case, allocator):
    return ours(case, allocator)["active_utilization"]


def table_published():
    rows = []
    for case, row in PUBLISHED.items():
        line = [case, row["caching_gb"], row["gmlake_gb"], row["saved_gb"]]
        line += [f"{row['caching_utilization']:.3f}", f"{row['gmlake_utilization']:.3f}"]
        for name in ("caching", "paper 128", "best"):
            line.append(f"{gib(ours(case, name)['reserved_bytes_peak'], 1)}")
        line += [gib(saved(case, name), 1) for name in ("paper 128", "best")]
        line += [f"{utilization(case, name):.3f}" for name in ("caching", "paper 128", "best")]
        rows.append([str(text) for text in line])
    head = ["case", "PyTorch", "GMLake", "saved", "util P", "util G"]
    head += ["caching", "paper", "best", "saved, paper", "saved, best"]
    return table(head + ["util caching", "util paper", "util best"], rows)


def excess_share(case):
    """What PyTorch holds beyond what is active, published and ours."""
    row, mine = PUBLISHED[case], ours(case, "caching")
    ours_bytes = mine["reserved_bytes_peak"] - mine["active_bytes_peak"]
    return row["caching_gb"] * (1 - row["caching_utilization"]), ours_bytes


def from_to(shares):
    return f"{percent(min(shares), 0)} to {percent(max(shares), 0)}"


def removed(allocator):
    """Share of PyTorch's reserved − active that is saved, least and most of R to LRO."""
    return from_to([saved(case, allocator) / excess_share(case)[1] for case in STRATEGIES[1:]])


def removed_published():
    cases = STRATEGIES[1:]
    return from_to([PUBLISHED[case]["saved_gb"] / excess_share(case)[0] for case in cases])


def gains(allocator, other):
    """By how many bytes `other` holds less than `allocator`, by strategy."""
    peak = lambda case, name: ours(case, name)["reserved_bytes_peak"]
    return [peak(case, allocator) - peak(case, other) for case in STRATEGIES]


def least_gain(allocator, other):
    return min(gains(allocator, other))


def most_gain(allocator, other):
    return max(gains(allocator, other))


def settings():
    first = next(iter(STRATEGY.values()))
    return [name for name in first if name not in ("caching",)]


def table_settings():
    rows = [["GMLake, published"]]
    for case in STRATEGIES:
        row = PUBLISHED[case]
        rows[0].append(f"{row['saved_gb']:.1f} ({row['gmlake_utilization']:.3f})")
    for name in settings():
        show = lambda case: f"{gib(saved(case, name), 1)} ({utilization(case, name):.3f})"
        rows.append([name] + [show(case) for case in STRATEGIES])
    return table(["allocator, limit in MiB"] + STRATEGIES, rows)


def table_active():
    rows = []
    for case in STRATEGIES:
        row = PUBLISHED[case]
        pytorch = row["caching_gb"] * row["caching_utilization"]
        gmlake = row["gmlake_gb"] * row["gmlake_utilization"]
        peak = lambda name: ours(case, name)["active_bytes_peak"]
        active = [peak(name) for name in ("caching", "paper 128", "best")]
        line = [case, f"{100 * (gmlake / pytorch - 1):+.2f} %"]
        line += [gib(active[0], 3)] + [f"{100 * (a / active[0] - 1):+.4f} %" for a in active[1:]]
        rows.append(line)
    return table(["case", "published, G to P", "caching, active GiB", "paper", "best"], rows)


def table_costs():
    """2 GiB made of pieces, in units of one malloc of 2 GiB; GMLake's Table 1 beside the H200."""
    paper = {
        "reserve": (0.003, 0.003, 0.002),
        "create": (18.1, 0.89, 0.79),
        "map": (0.70, 0.01, 0.002),
        "set access": (96.8, 8.2, 0.7),
        "total": (115.4, 9.1, 1.5),
    }
    measured = list(zip(*(h200_costs(piece) for piece in (2, 128, 1024))))
    measured.append(tuple(map(sum, zip(*measured))))
    rows = []
    for (call, theirs), mine in zip(paper.items(), measured):
        line = [call] + [f"{value:g}" for value in theirs]
        rows.append(line + [f"{value:.3g}" if value < 100 else f"{value:.1f}" for value in mine])
    head = ["call", "A100, 2 MB", "128 MB", "1024 MB", "H200, 2 MiB", "128 MiB", "1024 MiB"]
    return table(head, rows)


PROFILE = json.loads((HERE.parent / "src/device/profiles/h200.json").read_text())["calls"]
CALLS = ["address_reserve", "create", "map", "set_access"]


def measured_range(piece):
    """Microseconds of 2 GiB in pieces: reserve, create, map, access; None if not measured."""
    lines = (HERE.parent / "reports/vmm_ranges.csv").read_text().splitlines()[1:]
    for row in csv.DictReader(lines):
        if (row["total_mib"], row["piece_mib"]) == ("2048", str(piece)):
            return [float(row[key]) for key in ("reserve", "create", "map", "access_each")]
    return None


def h200_costs(piece):
    """The same in units of a malloc of 2 GiB; 1,024 MiB by the profile, twice what one costs."""
    at = lambda call, size: dict(PROFILE[call])[size]
    us = measured_range(piece)
    if us is None:
        pieces = 2048 // piece
        us = [at("address_reserve", 2048.0)]
        us += [pieces * at(call, float(piece)) for call in CALLS[1:]]
    return [value / at("malloc", 2048.0) for value in us]


def chunk_us():
    """A second address for a chunk of 2 MiB: reserve, map and access of 2 GiB, by 1,024."""
    reserve, _, mapped, access = measured_range(2)
    return f"{(reserve + mapped + access) / 1024:.1f}"


for name in ("stitching", "stitching_limits", "stitching_strategies"):
    shutil.copyfile(RESULTS / f"{name}.csv", REPORTS / f"{name}.csv")
fill("stitching", REPORTS, globals())
fill("gmlake", REPORTS, globals())
