#!/usr/bin/env python3
"""The archives that everything.sh leaves, as CSV files.

    results.py RESULTS_DIR REPORTS_DIR   gpu_*.csv from the STAGE.tar.gz files

`gpu_replays.csv` has a row a trace and allocator, `gpu_training.csv` one a training run, and
`gpu_checks.csv` one for everything that has no figures of its own. report.py makes a page of them.
"""

import csv
import io
import json
import re
import statistics
import sys
import tarfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from pages import gib, write  # noqa: E402

# What the simulator replays for PyTorch's own allocators.
SIMULATED = {"default": "caching"}


def stages(directory):
    """{stage: {file name: bytes}} of all archives."""
    found = {}
    for path in sorted(directory.glob("*.tar.gz")):
        with tarfile.open(path) as archive:
            members = [member for member in archive if member.isfile()]
            files = {Path(m.name).name: archive.extractfile(m).read() for m in members}
        found[path.name.removesuffix(".tar.gz")] = files
    return found


def results_named(files, prefix):
    """(rest of the name, result) of JSON files whose names begin so; arrays one by one."""
    for name in sorted(files):
        match = re.fullmatch(re.escape(prefix) + r"(.*)\.json", name)
        if match:
            result = json.loads(files[name])
            for one in result if isinstance(result, list) else [result]:
                yield match[1], one


def replays(found):
    """A row a trace and allocator: what was checked, and the times of the untouched runs."""
    rows = {}
    # Timed runs come last: what a row says of costs is then by their profile.
    for kind in ["touch-", "timing-"]:
        for stage, files in found.items():
            for _, result in [] if stage == "smoke" else results_named(files, kind):
                if "hardware" not in result:
                    continue
                key = (result["trace"]["name"], result["allocator"]["name"])
                row = rows.setdefault(key, {"times": []})
                row.update(replay_row(result))
                if kind == "timing-":
                    row["times"].append(result["wall"]["allocator_device_ns_measured"])
                else:
                    touch = result["hardware"]["touch"]
                    row |= {"touch_blocks": touch["blocks"], "touch_bytes": touch["bytes"]}
                    row["mismatches"] = touch["mismatches"]
    out = []
    for row in rows.values():
        times = row.pop("times")
        for name in ["touch_blocks", "touch_bytes", "mismatches"]:
            row.setdefault(name, "")
        measured = statistics.mean(times) if times else None
        row["repeats"] = len(times)
        row["measured_device_ns"] = round(measured) if times else ""
        row["spread"] = (max(times) - min(times)) / measured if measured else ""
        row["measured_over_simulated"] = (
            measured / row["simulated_device_ns"] if measured and row["simulated_device_ns"] else ""
        )
        out.append(row)
    return out


def replay_row(result):
    simulated = result["hardware"]["simulated"]
    memory = result["hardware"]["memory"]
    return {
        "trace": result["trace"]["name"],
        "allocator": result["allocator"]["name"],
        "gpu": result["device"]["name"],
        "driver": result["device"]["driver"],
        "profile": result["device"]["profile"],
        "status": result["outcome"]["status"],
        "reserved_bytes_peak": result["peaks"]["reserved_bytes_peak"],
        "simulated_reserved_bytes_peak": simulated["reserved_bytes_peak"],
        "sampled_reserved_bytes": memory["at_reserved_peak"]["reserved_bytes"],
        "sampled_used_bytes": memory["at_reserved_peak"]["used_bytes"],
        "device_calls": sum(result["calls"].values()),
        "simulated_device_ns": simulated["allocator_device_ns"],
    }


def trainings(found):
    """A row a training run, beside PyTorch's own allocator and the simulator's prediction."""
    rows = []
    for stage in ["smoke", "train", "lora"]:
        files = found.get(stage, {})
        runs = dict(results_named(files, "train-"))
        predicted = {
            result["allocator"]["name"].partition("+trace=")[0]: result["peaks"]
            for _, result in results_named(files, "predict")
        }
        base = runs.get("default") or runs.get("recording") or {}
        tiny = ", tiny" if stage == "smoke" else ""
        for run in runs.values():
            rows.append(training_row(run, base, predicted) | {"job": run["job"] + tiny})
    return rows


def losses_apart(run, base):
    """Largest difference of two losses of the same step, as a share of the loss."""
    losses = lambda run: [float.fromhex(loss) for loss in run["losses"]]
    return max(abs(a - b) / abs(b) for a, b in zip(losses(run), losses(base)))


def training_row(run, base, predicted):
    name = run["allocator"]
    same_batches = run["seed"] == base.get("seed")
    prediction = predicted.get(SIMULATED.get(name, name.removeprefix("plugin:")))
    same = lambda key: run.get(key) == base.get(key) if same_batches and base else ""
    calls = run["statistics"].get("device_ns") or {}
    return {
        "job": run["job"],
        "allocator": name + ("" if not run["recorded"] else ", recording"),
        "seed": run["seed"],
        "gpu": run["gpu"],
        "driver": run["driver"],
        "torch": run["torch"],
        "date": run["date"],
        "parameters": run["parameters"],
        "status": run["status"],
        "losses_equal": same("losses"),
        "weights_equal": same("weights"),
        "losses_apart": losses_apart(run, base) if same_batches and base else "",
        "allocated_bytes_peak": run["held"]["allocated_bytes_peak"],
        "reserved_bytes_peak": run["held"]["reserved_bytes_peak"],
        "predicted_reserved_bytes_peak": (
            prediction["reserved_bytes_peak"] if prediction and same_batches else ""
        ),
        "utilization": run["utilization"],
        "step_seconds_median": run["step_seconds_median"],
        "steps_timed": run["steps_timed"],
        "first_steps_seconds": sum(run["step_seconds"][: -run["steps_timed"]]),
        "device_used_bytes": run["device_used_bytes"],
        "allocator_device_ns": sum(calls.values()) if calls else "",
    }


def checks(found):
    """(check, subject, result, detail): everything that has no figures of its own."""
    rows = []
    columns = ["check", "subject", "result", "detail"]
    add = lambda *row: rows.append(dict(zip(columns, map(plain, row))))
    for stage, files in found.items():
        if "versions.txt" in files:
            lines = files["versions.txt"].decode(errors="replace").split("\n")
            card = lines[1] if len(lines) > 1 else ""
            torch, _, transformers = (lines[3:4] or [""])[0].partition(" ")
            names = [f"torch {torch}", f"transformers {transformers}"]
            add("machine", stage, card, "; ".join(lines[:1] + lines[2:3] + names))
        parts = {r[0]: r[1:] for r in csv.reader(io.StringIO(files.get("parts.csv", b"").decode()))}
        for name, (status, seconds) in parts.items():
            if status not in ["0", "skipped"]:
                add("part", f"{stage} {name}", status, line_of(files, name, -1))
        skipped = sum(status == "skipped" for status, _ in parts.values())
        if skipped:
            add("part", stage, "skipped", f"{skipped} parts, for want of time")
        for name in ["verify", "sanitizer"]:
            if name in parts and stage != "smoke":
                result = "ok" if parts[name][0] == "0" else "no"
                add(name, stage, result, line_of(files, name, 0 if name == "verify" else -1))
        for _, run in results_named(files, "crash-"):
            left = run["used_mib_after"] - run["used_mib_before"]
            held = run["used_mib_held"] - run["used_mib_before"]
            result = "too early" if run["ended_early"] else f"{left} MiB left"
            add("crash", f"SIG{run['signal']}: {run['command']}", result, f"held {held} MiB")
        for kind in [] if stage == "smoke" else ["oom", "streams", "graph"]:
            for _, run in results_named(files, kind + "-"):
                add(kind, run["allocator"], run["status"], told(kind, run))
    return rows


def told(kind, run):
    """What such a run shows, in one line."""
    if kind == "streams":
        control = run["words_changed_without_record_stream"]
        return f"{run['words_changed']} words changed; without record_stream {control:,}"
    if kind == "graph":
        hurt = f"{run['guards_hurt']} other tensors overwritten"
        return f"{run['replays_wrong']} replays wrong, {hurt}"
    if "exception" not in run:
        return "no exception"
    held, after = run["held_at_exception"], run["held_after_freeing"]
    reserved = f"{gib(held['reserved_bytes'])} GiB held then, {gib(after['reserved_bytes'])} after"
    message = " ".join(run["exception"]["message"].split())
    return f"{run['exception']['type']}: {message} [{reserved} freeing]"


def line_of(files, name, which):
    """The first (0) or last (-1) line that a part printed."""
    lines = files.get(f"{name}.log", b"").decode(errors="replace").strip().split("\n")
    return lines[which].strip()[:300]


def plain(text):
    """A text without the folders of the machine it came from."""
    return re.sub(r"(?<![\w/.])/(?:[\w.+-]+/)+", "", text)


def main(directory, reports):
    found = stages(directory)
    made = {"replays": replays(found), "training": trainings(found), "checks": checks(found)}
    for name, rows in made.items():
        if rows:
            write(reports / f"gpu_{name}.csv", rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
