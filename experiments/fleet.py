"""The fleet's measurements: runs commands and notes what they took, kills one and lets it go on, and
makes fleet.csv and fleet.md of the notes. Called by fleet.sh."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

from pages import fill, percent, read, table, write

EVENTS = 10**10


def run(command, limit_s=None):
    """Runs a command; after `limit_s` seconds it is killed. What it took, and what it said."""
    begin = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if limit_s is not None:
        time.sleep(limit_s)
        # Not through `child`, which would ask for its status first and so lose its usage.
        os.kill(child.pid, signal.SIGKILL)
    said = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    took = {
        "wall_seconds": round(time.monotonic() - begin, 3),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3),
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "exit": child.returncode,
    }
    return took, said


def note(work, step, took):
    with open(work / "notes.jsonl", "a") as file:
        file.write(json.dumps({"step": step, **took}) + "\n")


def measure(work, step, command):
    took, said = run(command)
    (work / f"{step.replace(' ', '-')}.log").write_text(said)
    if took["exit"] != 0:
        sys.exit(f"{step}: exit code {took['exit']}\n{said}")
    note(work, step, took)


def kill(work, kills, command):
    """Kills a run so many times, at equal distances of the time that the shards took, and lets the
    last attempt end."""
    whole_s = sum(row["wall_seconds"] for row in notes(work) if row["step"].startswith("shard"))
    for attempt in range(1, kills + 1):
        took, said = run(command, limit_s=whole_s / (kills + 1))
        if took["exit"] != -signal.SIGKILL:
            sys.exit(f"attempt {attempt} ended before it was killed\n{said}")
        note(work, f"killed {attempt}", {**took, "kept_cells": kept_cells(work)})
    took, said = run(command)
    if took["exit"] != 0:
        sys.exit(f"the last attempt: exit code {took['exit']}\n{said}")
    told = re.search(r"(\d+) of them kept from before", said)
    if kills and not (told and int(told[1]) > 0):
        sys.exit(f"nothing was kept from before the kills\n{said}")
    note(work, "resumed", {**took, "kept_cells": int(told[1]) if told else 0})


def kept_cells(work):
    """Whole lines among the kept results."""
    lines = (line for file in (work / "cache").glob("*.jsonl") for line in open(file, "rb"))
    return sum(line.endswith(b"}\n") for line in lines)


def notes(work):
    return [json.loads(line) for line in open(work / "notes.jsonl")]


def bytes_under(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def processor():
    names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    return names[0] if names else "unknown"


def results(work, traces, shards, compared, reports):
    """fleet.csv: a row a step. The first has what holds for all."""
    said = (work / "generate.log").read_text()
    events = re.search(r"in all: ([\d,]+) events", said)
    spread = re.search(r"events: (?:([\d,]+) to )?([\d,]+)", said)
    if not events or not spread:
        sys.exit(f"fraglab gen did not tell events:\n{said}")
    number = lambda text: int(text.replace(",", ""))
    files = [path for path in traces.iterdir() if not path.name.startswith(".")]
    cells = sum(1 for _ in open(work / "merged" / "fleet.csv")) - 1
    fixed = {
        "date": date.today().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "ranks": len(files),
        "events": number(events[1]),
        "events_least": number(spread[1] or spread[2]),
        "events_most": number(spread[2]),
        "cells": cells,
        "trace_bytes": sum(path.stat().st_size for path in files),
        "kept_bytes": bytes_under(work / "cache"),
        "shard_bytes": bytes_under(work / "shards"),
        "shards": shards,
        "compared_files": compared,
    }
    rows = []
    for row in notes(work):
        del row["exit"]
        rows.append({"step": row.pop("step"), "kept_cells": row.pop("kept_cells", None), **row})
    write(reports / "fleet.csv", [row | fixed for row in rows])


def seconds(value):
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def mib(value):
    return f"{value / 2**20:.0f} MiB"


class Fleet:
    """What the page says of the rows."""

    def __init__(self, rows):
        self.rows = rows
        self.fixed = rows[0]
        self.shards = [row for row in rows if row["step"].startswith("shard")]
        self.killed = [row for row in rows if row["step"].startswith("killed")]
        self.merge, self.resumed, self.generate = map(self.step, ("merge", "resumed", "generate"))
        self.wall_s = self.sum("wall_seconds", self.shards)
        self.cpu_s = self.sum("cpu_seconds", self.shards)
        # Idle cores count: that is what one pays for.
        self.core_s = self.wall_s * self.fixed["cores"]
        self.rate = self.fixed["events"] / self.core_s

    def step(self, name):
        return next(row for row in self.rows if row["step"] == name)

    @staticmethod
    def sum(column, rows):
        return sum(row[column] for row in rows)

    def spread(self):
        least, most = self.fixed["events_least"], self.fixed["events_most"]
        return f"{least:,}" if least == most else f"{least:,} to {most:,}"

    def peak(self, rows):
        return mib(max(row["peak_rss_bytes"] for row in rows))

    def steps(self):
        told = [("generate", [self.generate]), ("shards, one after the other", self.shards)]
        told += [("merge", [self.merge]), ("killed and resumed, in all", self.killed + [self.resumed])]
        rows = []
        for name, of in told:
            wall, cpu = self.sum("wall_seconds", of), self.sum("cpu_seconds", of)
            rows.append([name, seconds(wall), seconds(cpu), self.peak(of)])
        return table(["step", "wall", "CPU", "peak memory"], rows)

    def attempts(self):
        rows = []
        for row in self.killed + [self.resumed]:
            end = "ended" if row["step"] == "resumed" else "SIGKILL"
            kept = "" if row["kept_cells"] is None else f"{row['kept_cells']:,}"
            rows.append([row["step"], seconds(row["wall_seconds"]), end, kept])
        return table(["attempt", "ran for", "end", "cells kept"], rows)

    def projected_traces(self):
        return EVENTS * self.fixed["ranks"] / self.fixed["events"]

    def merge_s(self):
        """Merging grows with its rows."""
        return self.merge["wall_seconds"] * self.projected_traces() / self.fixed["ranks"]

    def projection(self):
        total_bytes = self.fixed["trace_bytes"] * EVENTS / self.fixed["events"]
        rows = []
        for cores in (self.fixed["cores"], 16, 64, 256, 1024, 4096):
            work_s = EVENTS / (self.rate * cores)
            bandwidth = total_bytes / work_s / 1e6
            rows.append(
                [f"{cores:,}", seconds(work_s), seconds(work_s + self.merge_s()), f"{bandwidth:,.1f} MB/s"]
            )
        return table(["cores", "replay", "with the merge", "read from storage"], rows)

    def a_trace(self, column):
        return self.fixed[column] / self.fixed["ranks"]


def pages(reports):
    fleet = Fleet(read(reports / "fleet.csv"))
    fill("fleet", reports, {"fleet": fleet, "EVENTS": EVENTS, "seconds": seconds, "percent": percent})


part, arguments = sys.argv[1], sys.argv[2:]
if part == "measure":
    measure(Path(arguments[0]), arguments[1], arguments[2:])
elif part == "kill":
    kill(Path(arguments[0]), int(arguments[1]), arguments[2:])
elif part == "results":
    results(Path(arguments[0]), Path(arguments[1]), int(arguments[2]), int(arguments[3]), Path(arguments[4]))
else:
    pages(Path(arguments[0]))
