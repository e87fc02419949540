#!/usr/bin/env python3
"""Ends a program that holds GPU memory by a signal, and says what is left on the card.

    crash.py --signal KILL --out left.json -- fraglab run --device cuda:0 ...

Waits until the program holds --hold GiB, lets it go on for --after seconds, sends the signal, and
compares what nvidia-smi says is in use before it began and after it ended. Exit status 1 if more
than 64 MiB stayed in use ten seconds later, or if the program ended too early.
"""

import argparse
import json
import signal
import subprocess
import sys
import time


def used_mib():
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--signal", choices=["INT", "KILL", "TERM"], required=True)
    parser.add_argument("--hold", type=float, default=4, help="GiB in use before the signal")
    parser.add_argument("--after", type=float, default=1, help="seconds from then on")
    parser.add_argument("--wait", type=float, default=50, help="most seconds until then")
    parser.add_argument("--out", required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()

    before = used_mib()
    # A shell may have started us with SIGINT ignored, which programs inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    program = subprocess.Popen(options.command)
    deadline = time.monotonic() + options.wait
    held = before
    while program.poll() is None and time.monotonic() < deadline:
        held = used_mib()
        if held - before >= 1024 * options.hold:
            time.sleep(options.after)
            held = used_mib()
            break
        time.sleep(0.2)
    early = program.poll() is not None
    if not early:
        program.send_signal(getattr(signal, f"SIG{options.signal}"))
    try:
        status = program.wait(timeout=20)
    except subprocess.TimeoutExpired:
        program.kill()
        status = "did not end"
    after = used_mib()
    patience = time.monotonic() + 10
    while after - before > 64 and time.monotonic() < patience:
        time.sleep(0.2)
        after = used_mib()
    result = {
        "command": " ".join(options.command),
        "signal": options.signal,
        "ended_early": early,
        "exit_status": status,
        "used_mib_before": before,
        "used_mib_held": held,
        "used_mib_after": after,
    }
    with open(options.out, "w") as file:
        json.dump(result, file, indent=1)
    print(json.dumps(result))
    return 1 if early or after - before > 64 or status == "did not end" else 0


if __name__ == "__main__":
    sys.exit(main())
