"""Generated jobs beside recorded ones, from the results that calibration.sh made.

    python3 experiments/calibration.py results RESULTS_DIR REPORTS_DIR   calibration.csv
    python3 experiments/calibration.py pages REPORTS_DIR                 calibration.md, from it
"""

import csv
import json
import sys
from pathlib import Path

from pages import fill, gib, read, table, write

REPORTS = Path(sys.argv[-1])
# Jobs whose batches are drawn: lengths of their own, not the recorded ones.
DRAWN = {"llama-1b-varlen"}


def phases(directory, job, kind):
    """Largest requested bytes by phase: the last step's, which repeats the ones before."""
    info = json.loads((directory / f"{job}.{kind}.info").read_text())
    steps = [name for name in info["phases"] if name.startswith("step")]
    last = max(int(name.split(".")[0][4:]) for name in steps)
    peaks = {}
    with open(directory / f"{job}.{kind}.csv", newline="") as file:
        for row in csv.DictReader(file):
            step, _, phase = row["phase"].partition(".")
            if step == f"step{last}" and phase:
                phase = phase.split(".")[0]
                peaks[phase] = max(peaks.get(phase, 0), int(row["requested_bytes"]))
    return peaks


def results(directory):
    rows = []
    for path in sorted(directory.glob("*.generated.run")):
        job = path.name.removesuffix(".generated.run")
        row = {"job": job}
        for kind in ("recorded", "generated"):
            result = json.loads((directory / f"{job}.{kind}.run").read_text())
            peaks = phases(directory, job, kind)
            row |= {
                f"{kind}_allocs": result["trace"]["allocs"],
                f"{kind}_requested_bytes_peak": result["peaks"]["requested_bytes_peak"],
                f"{kind}_reserved_bytes_peak": result["peaks"]["reserved_bytes_peak"],
                f"{kind}_forward_bytes": peaks.get("forward", ""),
                f"{kind}_backward_bytes": peaks.get("backward", ""),
                f"{kind}_optimizer_bytes": peaks.get("optimizer", ""),
            }
        rows.append(row)
    write(REPORTS / "calibration.csv", rows)


def ratio(row, key):
    recorded, generated = row[f"recorded_{key}"], row[f"generated_{key}"]
    return None if not recorded or generated is None else generated / recorded


def off(value):
    return "–" if value is None else "exact" if value == 1 else f"{100 * (value - 1):+.2f} %"


def peaks_table(rows):
    head = ["job", "allocs rec.", "gen.", "live peak GiB rec.", "gen.", "", "reserved GiB rec.", "gen.", ""]
    body = [
        [
            f"`{row['job']}`",
            f"{row['recorded_allocs']:,}",
            f"{row['generated_allocs']:,}",
            gib(row["recorded_requested_bytes_peak"]),
            gib(row["generated_requested_bytes_peak"]),
            off(ratio(row, "requested_bytes_peak")),
            gib(row["recorded_reserved_bytes_peak"]),
            gib(row["generated_reserved_bytes_peak"]),
            off(ratio(row, "reserved_bytes_peak")),
        ]
        for row in rows
    ]
    return table(head, body)


def phases_table(rows):
    head = ["job", "forward", "backward", "optimizer"]
    keys = ["forward_bytes", "backward_bytes", "optimizer_bytes"]
    body = [[f"`{row['job']}`"] + [off(ratio(row, key)) for key in keys] for row in rows]
    return table(head, body)


def worst(rows, key):
    return max(abs(ratio(row, key) - 1) for row in rows)


if __name__ == "__main__":
    if sys.argv[1] == "results":
        results(Path(sys.argv[2]))
    else:
        rows = read(REPORTS / "calibration.csv")
        fixed = [row for row in rows if row["job"] not in DRAWN]
        drawn = [row for row in rows if row["job"] in DRAWN]
        fill("calibration", REPORTS, globals())
