"""The ablation of PatrickStar's options from the results that chunk_options.sh made.

    python3 experiments/chunk_options.py results RESULTS_DIR REPORTS_DIR   chunk_options.csv
    python3 experiments/chunk_options.py pages REPORTS_DIR                 the page and the figure

The page is the template chunk_options.md.in; the figure is drawn from the CSV alone.
"""

import json
import sys
from pathlib import Path

from pages import GIB, fill, gib, read, table, write

REPORTS = Path(sys.argv[-1])
MODELS = {"GPT3_8B": "8 B", "GPT_DS_20B": "20 B"}


def results(directory):
    """chunk_options.csv: a row a model, number of GPUs and set of options."""
    rows = []
    for line in (directory / "cells.tsv").read_text().splitlines():
        file, model, gpus, options = line.split("\t")
        result = json.loads((directory / file).read_text())
        chunk = result["chunk"]
        steps = chunk["steps"]
        last = steps[-1] if steps else None
        moved = lambda key: sum(
            last[kind][key]
            for kind in
            ["forward", "backward", "adam", "gradient_reads", "write_backs", "transfers"]
        )
        collectives = lambda: sum(v for k, v in last["collectives"].items() if k.endswith("_bytes"))
        full = last is not None and chunk["hard_stop"] is None and len(steps) == 3
        rows.append({
            "model": model,
            "gpus": gpus,
            "options": options,
            "status": result["outcome"]["status"],
            "requested_bytes_peak": result["peaks"]["requested_bytes_peak"],
            "reserved_bytes_peak": result["peaks"]["reserved_bytes_peak"],
            "gpu_chunk_bytes_peak": chunk["gpu_chunk_bytes_peak"],
            "host_bytes_peak": chunk["host_bytes_peak"],
            "construction_host_bytes_peak": chunk["construction_host_bytes_peak"],
            "h2d_bytes": moved("h2d_bytes") if full else "",
            "d2h_bytes": moved("d2h_bytes") if full else "",
            "collective_bytes": collectives() if full else "",
            "warm_up_step_ns": steps[0]["times"]["step_ns"] if steps else "",
            "step_ns": last["times"]["step_ns"] if full else "",
            "compute_ns": last["times"]["compute_ns"] if full else "",
            "transfer_ns": last["times"]["transfer_ns"] if full else "",
            "adam_ns": last["times"]["adam_ns"] if full else "",
            "collective_ns": last["times"]["collective_ns"] if full else "",
            "allocation_ns": last["times"]["allocation_ns"] if full else "",
            "over_budget": sum(step["over_budget"] for step in steps),
            "gpu_adam_groups": chunk["gpu_adam_groups"],
            "margin": "" if chunk["margin"] is None else chunk["margin"],
        })
    write(REPORTS / "chunk_options.csv", rows)


def rows_of(rows, model, gpus):
    return [row for row in rows if (row["model"], row["gpus"]) == (model, gpus)]


def find(rows, model, gpus, options):
    return next(row for row in rows_of(rows, model, gpus) if row["options"] == options)


def seconds(ns):
    return "–" if ns is None else f"{ns / 1e9:.2f}"


def options_table(rows, model, gpus):
    head = ["options", "status", "GPU peak", "reserved", "chunks", "host peak", "up", "down"]
    head += ["collectives", "step s", "warm-up s", "host, building"]
    body = []
    for row in rows_of(rows, model, gpus):
        body.append([
            row["options"],
            row["status"],
            gib(row["requested_bytes_peak"]),
            gib(row["reserved_bytes_peak"]),
            gib(row["gpu_chunk_bytes_peak"]),
            gib(row["host_bytes_peak"], 1),
            gib(row["h2d_bytes"]),
            gib(row["d2h_bytes"]),
            gib(row["collective_bytes"]),
            seconds(row["step_ns"]),
            seconds(row["warm_up_step_ns"]),
            gib(row["construction_host_bytes_peak"], 1),
        ])
    return table(head, body)


# The figure.

COLORS = {("GPT3_8B", 1): "#9ecae1", ("GPT3_8B", 8): "#3182bd"}
COLORS |= {("GPT_DS_20B", 1): "#fdae6b", ("GPT_DS_20B", 8): "#e6550d"}
PANELS = [
    ("GPU peak, GiB", lambda row: (row["requested_bytes_peak"] / GIB, 0)),
    ("host peak, GiB", lambda row: (row["host_bytes_peak"] / GIB, 0)),
    ("moved in a step, GiB: up, down (pale)",
     lambda row: ((row["h2d_bytes"] or 0) / GIB, (row["d2h_bytes"] or 0) / GIB)),
    ("step, s", lambda row: ((row["step_ns"] or 0) / 1e9, 0)),
]


def nice(value):
    """A round number not below the value, for the end of an axis."""
    scale = 10 ** (len(str(int(max(value, 1)))) - 1)
    return next(step * scale for step in (1, 2, 3, 4, 5, 6, 8, 10) if step * scale >= value)


def figure(rows):
    names = list(dict.fromkeys(row["options"] for row in rows))
    left, width, gap, bar, top = 250, 210, 24, 6, 64
    height = 4 * bar + 10
    total = top + height * len(names) + 40
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + 4 * (width + gap)}" '
        f'height="{total}" font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="100%" fill="white"/>',
    ]
    x = left
    for (model, gpus), color in COLORS.items():
        label = f"{MODELS[model]}, {gpus} GPU{'s' if gpus > 1 else ''}"
        out.append(f'<rect x="{x}" y="12" width="12" height="12" fill="{color}"/>')
        out.append(f'<text x="{x + 18}" y="22">{label}</text>')
        x += 120
    out.append(f'<text x="{x}" y="22">× out of memory</text>')
    for at, name in enumerate(names):
        y = top + at * height
        if at % 2:
            out.append(f'<rect x="0" y="{y}" width="100%" height="{height}" fill="#f5f5f5"/>')
        out.append(f'<text x="8" y="{y + height / 2 + 4}">{name}</text>')
    for panel, (title, value) in enumerate(PANELS):
        x = left + panel * (width + gap)
        end = nice(max(sum(value(row)) for row in rows))
        out.append(f'<text x="{x}" y="{top - 22}" font-weight="bold">{title}</text>')
        for part in (0, 0.5, 1):
            at = x + part * width
            out.append(f'<line x1="{at}" y1="{top - 4}" x2="{at}" y2="{total - 36}" stroke="#ccc"/>')
            out.append(f'<text x="{at}" y="{top - 8}" text-anchor="middle">{end * part:g}</text>')
        for line, name in enumerate(names):
            for index, (key, color) in enumerate(COLORS.items()):
                row = next((r for r in rows_of(rows, *key) if r["options"] == name), None)
                if row is None:
                    continue
                y = top + line * height + 5 + index * bar
                first, second = (part / end * width for part in value(row))
                out.append(f'<rect x="{x}" y="{y}" width="{first:.1f}" height="{bar - 1}" fill="{color}"/>')
                if second > 0:
                    out.append(
                        f'<rect x="{x + first:.1f}" y="{y}" width="{second:.1f}" '
                        f'height="{bar - 1}" fill="{color}" fill-opacity="0.45"/>'
                    )
                if row["status"] != "ok":
                    out.append(f'<text x="{x + first + second + 3:.1f}" y="{y + bar}" font-size="9">×</text>')
    out.append("</svg>")
    (REPORTS / "chunk_options.svg").write_text("\n".join(out) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "results":
        results(Path(sys.argv[2]))
    else:
        rows = read(REPORTS / "chunk_options.csv")
        figure(rows)
        fill("chunk_options", REPORTS, globals())
