"""What the scripts that make reports have in common: numbers in words, tables, templates."""

import csv
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
GIB = 2**30


def number(text):
    """A field of a CSV: numbers as such, nothing as None."""
    if text == "":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def read(path):
    """Rows of a CSV file, numbers as such."""
    with open(path, newline="") as file:
        return [{k: number(v) for k, v in row.items()} for row in csv.DictReader(file)]


def write(path, rows):
    """A CSV file of these rows, which have the same columns."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def gib(value, digits=2):
    return "–" if value is None else f"{value / GIB:.{digits}f}"


def percent(share, digits=1):
    return f"{100 * share:.{digits}f} %"


def bare(trace):
    return f"`{trace.removesuffix('.rank0')}`"


def names(traces):
    return ", ".join(map(bare, traces)) or "none"


def table(head, rows):
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)] + rows
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill(name, reports, scope):
    """Writes NAME.md into `reports`: the template NAME.md.in with every {{expression}} replaced by
    what it gives in `scope`."""
    template = (HERE / f"{name}.md.in").read_text()
    value = lambda found: str(eval(found[1], scope))
    (reports / f"{name}.md").write_text(re.sub(r"\{\{(.+?)\}\}", value, template, flags=re.S))
