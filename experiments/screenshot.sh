#!/usr/bin/env bash
# Makes reports/report.png: what `fraglab run --report` shows of llama-1b-varlen.
#
#   experiments/screenshot.sh [TRACE]
#
# FRAGLAB names the program, by default target/release/fraglab; FRAGLAB_CHROMIUM the browser, by
# default chromium on PATH. The picture is 1400 pixels wide; fonts are those of the machine, so its
# bytes differ from one to another. Where pngquant is there, it makes the picture smaller.
set -euo pipefail
cd "$(dirname "$0")/.."

trace=${1:-traces/llama-1b-varlen.json.zst}
fraglab=${FRAGLAB:-target/release/fraglab}
browser=${FRAGLAB_CHROMIUM:-chromium}
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT
command -v "$browser" >/dev/null || {
    echo "$0: no $browser: install Chromium or set FRAGLAB_CHROMIUM to its path" >&2
    exit 2
}

"$fraglab" run --trace "$trace" --report "$scratch/report" --quiet
"$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --virtual-time-budget=4000 \
    --user-data-dir="$scratch/profile" --window-size=1400,1330 \
    --screenshot="$scratch/report.png" "file://$scratch/report/index.html" 2>/dev/null
if command -v pngquant >/dev/null; then
    pngquant --force --output "$scratch/report.png" 64 "$scratch/report.png"
fi
mkdir -p reports
mv "$scratch/report.png" reports/report.png
ls -l reports/report.png
