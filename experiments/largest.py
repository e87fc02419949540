"""The largest model that fits, from the chunk plans and runs that largest.sh made.

    python3 experiments/largest.py runs PLANS_DIR
    python3 experiments/largest.py pages PLANS_DIR REPORTS_DIR

PLANS_DIR holds PLATFORM.RANKS.JOB.MODEL.json as `fraglab plan-chunks --json` writes them, with the
jobs of JOBS. `runs` prints what the manager is then run on, a line a run: name, arguments of
`fraglab gen`, GPU and host memory, chunk size. `pages` reads NAME WAY.run, what `fraglab run
--json` wrote of each, too. REPORTS_DIR gets largest_model.csv, a row a plan, largest_runs.csv, a
row a run, and largest_model.md, the template largest_model.md.in filled in from them and from
largest_published.csv.
"""

import csv
import json
import sys
from pathlib import Path

from pages import HERE, fill, table

PART, PLANS = sys.argv[1], Path(sys.argv[2])
MI = 2**20
GIB = 2**30
JOBS = ["batch4", "batch8", "batch16", "offload", "tiled"]
RULES = ["searched", "corrected", "managed"]
# Hidden size, layers, heads (spec patrickstar 1.4).
SHAPES = {
    "GPT2_1B": "2048 20 16",
    "GPT2_2B": "2048 40 16",
    "GPT2_4B": "2304 64 16",
    "GPT3_6B": "3072 53 16",
    "GPT3_8B": "3072 72 16",
    "GPT3_10B": "4096 50 16",
    "GPT3_11B": "4096 55 16",
    "GPT3_12B": "4096 60 16",
    "GPT3_13B": "4096 65 16",
    "GPT3_15B": "4096 78 16",
    "GPT3_18B": "4096 90 16",
    "GPT_DS_20B": "8192 25 16",
    "GPT_DS_40B": "8192 50 16",
    "GPT_DS_50B": "8192 62 16",
    "GPT_DS_60B": "8192 75 16",
    "GPT_DS_68B": "9216 66 16",
    "GPT_175B": "12288 96 96",
}
SCRIPT = 384 * MI
WAYS = ["", "+quirks=true+with_mem_cache=true", "+quirks=true"]
COLUMNS = ["platform", "ranks", "local_ranks", "gpu_bytes", "host_bytes", "job", "model"]
COLUMNS += ["elements", "working_bytes", "smallest_chunk_elements"]
COLUMNS += ["nearest_elements"]
for rule in RULES:
    for grid in ["shipped", "script", "fine"]:
        COLUMNS += [f"{rule}_{grid}_elements", f"{rule}_{grid}_bytes"]
for rule in RULES:
    COLUMNS += [f"{rule}_short_of", f"{rule}_short_bytes"]


def published():
    with open(HERE / "largest_published.csv", newline="") as file:
        return list(csv.DictReader(file))


def key_of(row):
    return row["platform"], int(row["ranks"])


def script_candidate(plan):
    """The row of the size that the A100's scripts use."""
    rows = [row for row in plan["rows"] if row["chunk_elements"] == SCRIPT]
    return rows[0]["candidate"]


def row_of(path, plan):
    platform, ranks, job, model = path.name.removesuffix(".json").split(".")
    machine = plan["machine"]
    row = {"platform": platform, "ranks": int(ranks), "job": job, "model": model}
    for name in ["local_ranks", "gpu_bytes", "host_bytes", "working_bytes"]:
        row[name] = machine[name]
    for name in ["elements", "smallest_chunk_elements"]:
        row[name] = plan["model"][name]
    row["nearest_elements"] = plan["fine"]["managed"]["nearest_elements"]
    script = script_candidate(plan)
    for rule in RULES:
        fine = plan["fine"][rule]
        found = {"shipped": plan["shipped"][rule]["best"], "fine": fine["best"]}
        found["script"] = script if script and script[rule] is None else None
        for grid, best in found.items():
            row[f"{rule}_{grid}_elements"] = best and best["chunk_elements"]
            row[f"{rule}_{grid}_bytes"] = best and best["rank_bytes"]
        misfit = fine["misfit"]
        row[f"{rule}_short_of"] = misfit and misfit["room"]
        row[f"{rule}_short_bytes"] = misfit and misfit["need_bytes"] - misfit["have_bytes"]
    return row


def write(path, columns, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_rows():
    """Rows of largest_model.csv in the order of platforms, jobs, sizes."""
    rows = [row_of(path, json.loads(path.read_text())) for path in PLANS.glob("*.json")]
    order = [key_of(row) for row in published()]
    place = lambda row: (order.index(key_of(row)), JOBS.index(row["job"]), row["elements"])
    rows.sort(key=place)
    return rows


ROWS = read_rows()


RUN_COLUMNS = ["platform", "ranks", "model", "way", "chunk_elements", "ran", "host_bytes_peak"]
RUN_COLUMNS += ["gpu_bytes_peak", "phantom_host_bytes", "reserved_bytes_peak", "message"]


def plans(machine, job):
    return [row for row in ROWS if key_of(row) == key_of(machine) and row["job"] == job]


def short(model):
    """`GPT_DS_68B` is `68B`."""
    return model.rsplit("_", 1)[-1]


def largest(machine, job, fits):
    """The name of the largest model of which `fits` holds, and its row."""
    rows = [row for row in plans(machine, job) if fits(row)]
    return max(rows, key=lambda row: row["elements"], default=None)


def has(rule, *grids):
    return lambda row: any(row[f"{rule}_{grid}_elements"] is not None for grid in grids)


def named(row):
    return short(row["model"]) if row else "–"


def with_size(row, rule, *grids):
    """The model and the chunk size that needs least of those grids."""
    if not row:
        return "–"
    sizes = [(row[f"{rule}_{grid}_bytes"], row[f"{rule}_{grid}_elements"]) for grid in grids]
    best = min(size for size in sizes if size[0] is not None)
    return f"{short(row['model'])} ({best[1] // MI})"


def everything(row):
    """18 bytes a parameter in all memory there is."""
    hosts = -(-row["ranks"] // row["local_ranks"])
    return 18 * row["elements"] <= row["ranks"] * row["gpu_bytes"] + hosts * row["host_bytes"]


def static_split(row):
    """fp16 parameters and gradients on every GPU, 14 bytes on the hosts, the same shares used."""
    hosts = -(-row["ranks"] // row["local_ranks"])
    on_gpu = 4 * row["elements"] + row["working_bytes"] <= 0.9 * row["gpu_bytes"]
    return on_gpu and 14 * row["elements"] <= 0.9 * hosts * row["host_bytes"]


def gpus(machine):
    return f"{machine['ranks']} × {machine['platform']}"


def table_main():
    head = ["", "PatrickStar", "searched, its sizes", "searched, every Mi", "corrected, every Mi"]
    head += ["managed, its sizes", "managed, every Mi"]
    rows = []
    for machine in published():
        fits = lambda rule, *grids: with_size(
            largest(machine, "batch8", has(rule, *grids)), rule, *grids
        )
        cells = [gpus(machine), f"**{short(machine['patrickstar'])}**"]
        cells += [fits("searched", "shipped", "script"), fits("searched", "fine")]
        cells += [fits("corrected", "fine"), fits("managed", "shipped", "script")]
        rows.append(cells + [fits("managed", "fine")])
    return table(head, rows)


def table_jobs():
    words = ["batch 4", "batch 8", "batch 16", "8, checkpoints on the host"]
    head = ["", "PatrickStar"] + words + ["8, tiled, tables on the host"]
    rows = []
    for machine in published():
        cells = [gpus(machine), f"**{short(machine['patrickstar'])}**"]
        rows.append(cells + [named(largest(machine, job, has("managed", "fine"))) for job in JOBS])
    return table(head, rows)


def table_deepspeed():
    head = ["", "DeepSpeed", "18·P in all memory", "4·P on a GPU, 14·P on hosts", "chunks, managed"]
    rows = []
    for machine in published():
        told = f"**{machine['deepspeed']}B**" if machine["deepspeed"] else "–"
        cells = [gpus(machine), told]
        for fits in [everything, static_split, has("managed", "fine")]:
            cells.append(named(largest(machine, "batch8", fits)))
        rows.append(cells)
    return table(head, rows)


ROOMS = {
    "warmup": "a GPU's warm-up room",
    "together": "GPUs and host together",
    "host_at_start": "the host when the model is built",
    "gpu": "a GPU beside working memory",
}


def next_one(machine, job="batch8"):
    """The smallest model that the manager's budgets refuse."""
    refused = [row for row in plans(machine, job) if not has("managed", "fine")(row)]
    return min(refused, key=lambda row: row["elements"], default=None)


def table_limits():
    head = ["", "first refused", "short of", "by GiB", "working memory GiB"]
    rows = []
    for machine in published():
        row = next_one(machine)
        if row is None:
            rows.append([gpus(machine), "none of these", "–", "–", "–"])
            continue
        lacking = f"{row['managed_short_bytes'] / GIB:.1f}"
        working = f"{row['working_bytes'] / GIB:.1f}"
        room = ROOMS[row["managed_short_of"]]
        rows.append([gpus(machine), short(row["model"]), room, lacking, working])
    return table(head, rows)


def run_name(row):
    return f"{row['platform']}.{row['ranks']}.{row['model']}"


def around(machine):
    """Plans of models from 0.8 to three times as large as the published one, batch 8."""
    alike = plans(machine, "batch8")
    told = [row["elements"] for row in alike if row["model"] == machine["patrickstar"]][0]
    return [row for row in alike if 0.8 * told <= row["elements"] <= 3 * told]


def runs():
    """What the manager is run on."""
    for machine in published():
        for row in around(machine):
            size = row["managed_fine_elements"] or row["nearest_elements"]
            shape = f"{SHAPES[row['model']]} 8 {row['ranks']} {row['local_ranks']}"
            print(run_name(row), shape, row["gpu_bytes"], row["host_bytes"], size, sep=",")


def run_row(plan, way):
    row = {name: plan[name] for name in ["platform", "ranks", "model"]}
    row["way"] = way.removeprefix("+") or "fixed"
    row["chunk_elements"] = plan["managed_fine_elements"] or plan["nearest_elements"]
    path = PLANS / f"{run_name(plan)}{way}.run"
    if not path.exists():
        return row | {"ran": False, "message": "the host cannot hold the model"}
    result = json.loads(path.read_text())
    for name in ["host_bytes_peak", "gpu_bytes_peak", "phantom_host_bytes"]:
        row[name] = result["chunk"][name]
    row["reserved_bytes_peak"] = result["peaks"]["reserved_bytes_peak"]
    row["ran"] = result["outcome"]["status"] == "ok"
    row["message"] = result["outcome"]["message"]
    return row


def read_runs():
    """Rows of largest_runs.csv."""
    tried = [(plan, way) for machine in published() for plan in around(machine) for way in WAYS]
    return [run_row(plan, way) for plan, way in tried]


def ran(machine, way):
    """The largest model that ran so."""
    word = way.removeprefix("+") or "fixed"
    alike = [row for row in RUNS if key_of(row) == key_of(machine) and row["way"] == word]
    return max((row for row in alike if row["ran"]), key=lambda row: SIZE[row["model"]], default=None)


def table_runs():
    head = ["", "PatrickStar", "managed, by the rule", "run", "run, quirks and cache", "run, quirks"]
    rows = []
    for machine in published():
        cells = [gpus(machine), f"**{short(machine['patrickstar'])}**"]
        cells.append(named(largest(machine, "batch8", has("managed", "fine"))))
        rows.append(cells + [named(ran(machine, way)) for way in WAYS])
    return table(head, rows)


def grid_costs():
    """Machines on which every Mi holds a larger model than PatrickStar's sizes, by the manager."""
    told = []
    for machine in published():
        least = largest(machine, "batch8", has("managed", "shipped", "script"))
        most = largest(machine, "batch8", has("managed", "fine"))
        if least and most and least["elements"] < most["elements"]:
            told.append(f"{named(least)} becomes {named(most)} on {gpus(machine)}")
    return "; ".join(told) or "the same model everywhere else"


def tib_costs():
    return f"{0.9 * (2**40 - 10**12) / 1e9:.0f} GB of its 0.9"


def left(platform, ranks):
    """The largest model that runs with the quirks and without the cache."""
    return named(ran({"platform": platform, "ranks": ranks}, WAYS[2]))


def disagreements():
    """Runs that the rule judges otherwise."""
    told = []
    for machine in published():
        for plan in around(machine):
            if run_row(plan, "")["ran"] != has("managed", "fine")(plan):
                told.append(f"{short(plan['model'])} on {gpus(machine)}")
    return ", ".join(told) or "nowhere"


if PART == "runs":
    runs()
else:
    REPORTS = Path(sys.argv[3])
    RUNS = read_runs()
    SIZE = {row["model"]: row["elements"] for row in ROWS}
    write(REPORTS / "largest_model.csv", COLUMNS, ROWS)
    write(REPORTS / "largest_runs.csv", RUN_COLUMNS, RUNS)
    fill("largest_model", REPORTS, globals())
