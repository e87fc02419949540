#!/bin/sh
# Reads decompressed snapshots with fraglab and with CPython's pickle.load, one process each, and
# prints seconds, MB/s and the peak of resident memory of both.
#
#   benches/import_vs_cpython.sh [FILE.pickle[.gz] ...]
#
# Without arguments: the recordings named below, beside the repository.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ $# -eq 0 ]; then
    recordings="$here/../shared/recordings"
    set -- "$recordings/llama-1b-varlen.pickle.gz" "$recordings/llama-1b-varlen.s4.stacks.pickle.gz"
fi
for file in "$@"; do
    case $file in
        *.gz) plain="$work/$(basename "$file" .gz)" && gzip -dc "$file" >"$plain" ;;
        *) plain=$file ;;
    esac
    echo "$(basename "$plain"), $(wc -c <"$plain") bytes"
    for _ in 1 2 3; do
        (cd "$here" && cargo bench --quiet --no-default-features --features cli \
            --bench import -- --once "$plain")
        python3 - "$plain" <<'PYTHON'
import os, pickle, resource, sys, time
start = time.perf_counter()
with open(sys.argv[1], "rb") as file:
    snapshot = pickle.load(file)
seconds = time.perf_counter() - start
size = os.path.getsize(sys.argv[1])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
entries = sum(map(len, snapshot["device_traces"]))
print(f"CPython  {seconds:.3f} s  {size / seconds / 1e6:.0f} MB/s  peak RSS {peak / 1e6:.0f} MB "
      f"({peak / size:.2f} x file)  {entries} entries", flush=True)
os._exit(0)
PYTHON
    done
done
