#!/usr/bin/env python3
"""The page about a real card, from the CSV files that results.py made.

    report.py REPORTS_DIR   gpu.md, from gpu.md.in
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from pages import fill, gib, percent, read, table  # noqa: E402

REPORTS = Path(sys.argv[1])
MIB = 2**20
# Simulated device time is to be within this share of the measured one.
BAND = 0.25


def rows_of(name):
    path = REPORTS / f"gpu_{name}.csv"
    return read(path) if path.exists() else []


def of_check(name):
    return [row for row in CHECKS if row["check"] == name]


def machine():
    cards = sorted({f"{r['result']} ({r['detail']})" for r in of_check("machine")})
    return "; ".join(cards) or "not run yet"


def order(rows, key):
    return list(dict.fromkeys(row[key] for row in rows))


def matrix(value):
    """Traces down, allocators across; `value` gives the text of a row of the CSV."""
    allocators = order(REPLAYS, "allocator")
    cells = {(r["trace"], r["allocator"]): value(r) for r in REPLAYS}
    body = [
        [f"`{trace}`"] + [cells.get((trace, allocator), "–") for allocator in allocators]
        for trace in order(REPLAYS, "trace")
    ]
    return table(["trace"] + [f"`{a}`" for a in allocators], body)


def touched(row):
    if row["mismatches"] is None:
        return "–"
    if row["mismatches"]:
        return f"**{row['mismatches']} wrong**"
    return f"{row['touch_blocks']:,} ({row['touch_bytes'] / 2**40:.2f})"


def checked():
    """All of them together, in a sentence."""
    total = lambda key: sum(row[key] or 0 for row in REPLAYS)
    blocks, written = f"{total('touch_blocks'):,}", f"{total('touch_bytes') / 2**40:.1f}"
    return f"{blocks} blocks, {written} TiB, {total('mismatches')} mismatches."


def ratio(row):
    value = row["measured_over_simulated"]
    if value is None:
        return "–"
    text = f"{value:.2f}"
    return text if within(row) else f"**{text}**"


def within(row):
    """Whether the simulated time is off by at most a quarter of the measured one."""
    return abs(1 / row["measured_over_simulated"] - 1) <= BAND


def timed():
    return [row for row in REPLAYS if row["measured_over_simulated"]]


def beyond():
    rows = sorted((r for r in timed() if not within(r)), key=lambda r: r["measured_over_simulated"])
    milliseconds = lambda ns: f"{ns / 1e6:,.1f}"
    body = [
        [
            f"`{r['trace']}`, `{r['allocator']}`",
            milliseconds(r["simulated_device_ns"]),
            milliseconds(r["measured_device_ns"]),
            f"{r['measured_over_simulated']:.2f}",
            percent(r["spread"]),
            f"{r['device_calls']:,}",
        ]
        for r in rows
    ]
    head = ["pair", "simulated ms", "measured ms", "ratio", "between repeats", "device calls"]
    return table(head, body) if rows else "None is."


def reserved_differs():
    rows = [r for r in REPLAYS if r["reserved_bytes_peak"] != r["simulated_reserved_bytes_peak"]]
    if not rows:
        return f"In all {len(REPLAYS)} pairs what the simulator says, to the byte."
    body = [
        [
            f"`{r['trace']}`, `{r['allocator']}`",
            gib(r["simulated_reserved_bytes_peak"], 3),
            gib(r["reserved_bytes_peak"], 3),
            f"{100 * (r['reserved_bytes_peak'] / r['simulated_reserved_bytes_peak'] - 1):+.2f} %",
        ]
        for r in rows
        if r["simulated_reserved_bytes_peak"]
    ]
    same_bytes = f"{len(REPLAYS) - len(rows)} of {len(REPLAYS)}"
    exact = f"In {same_bytes} pairs what the simulator says, to the byte; not in:"
    return exact + "\n\n" + table(["pair", "simulated GiB", "on the card GiB", ""], body)


def driver_overhead():
    """Most that the driver says is used beyond what an allocator says it holds."""
    over = [(r["sampled_used_bytes"] - r["sampled_reserved_bytes"]) / MIB for r in REPLAYS]
    return f"{min(over):,.0f} to {max(over):,.0f} MiB" if over else "–"


def same(row):
    """Whether losses and weights are those of PyTorch's own allocator; CSV has them as words."""
    words = {str(row["losses_equal"]), str(row["weights_equal"])}
    if "False" in words:
        return f"within {row['losses_apart']:.0e}"
    return "yes" if words == {"True"} else "–"


def training_table(job):
    body = []
    for row in [row for row in TRAINING if row["job"] == job]:
        predicted = row["predicted_reserved_bytes_peak"]
        off = row["reserved_bytes_peak"] / predicted - 1 if predicted else None
        body.append(
            [
                f"`{row['allocator']}`" + ("" if row["seed"] == 1 else ", other batches"),
                same(row),
                gib(row["allocated_bytes_peak"]),
                gib(row["reserved_bytes_peak"]),
                gib(predicted),
                "–" if off is None else f"{100 * off:+.2f} %",
                percent(row["utilization"]),
                f"{1000 * row['step_seconds_median']:,.0f}",
                f"{row['first_steps_seconds']:.2f}",
            ]
        )
    head = ["allocator", "same losses", "allocated GiB", "reserved GiB", "predicted GiB", ""]
    head += ["utilization", "step ms", "first 3 steps s"]
    return table(head, body) if body else "Not run yet."


def check_table(name, subject):
    rows = of_check(name)
    body = [[f"`{r['subject']}`", str(r["result"]), str(r["detail"] or "")] for r in rows]
    return table([subject, "result", ""], body).replace("---:", "---") if rows else "Not run yet."


if __name__ == "__main__":
    REPLAYS, TRAINING, CHECKS = map(rows_of, ["replays", "training", "checks"])
    fill("gpu", REPORTS, globals())