#!/usr/bin/env bash
# Submits an experiment to Slurm in N shards, and the job that merges them when all are done:
#
#   experiments/cluster/submit.sh N OUT X.toml [OPTIONS OF fraglab experiment]
#   experiments/cluster/submit.sh 64 /shared/out fleet.toml
#   experiments/cluster/submit.sh 64 /shared/out /shared/ranks --alloc caching,expandable
#
# OUT and what the experiment reads must be on storage that every node sees. Prints the two job
# numbers. If some shards fail for good, the merge is dropped; the same command again runs only what
# is missing. SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT and the like choose where it runs.
set -euo pipefail

if [[ $# -lt 3 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0" | sed '$d' >&2
    exit 2
fi
shards=$1
mkdir -p "$2"
out=$(cd "$2" && pwd)
shift 2
here=$(cd "$(dirname "$0")" && pwd)

array=$(sbatch --parsable --array="1-$shards" "$here/slurm.sbatch" "$shards" "$out" "$@")
merge=$(sbatch --parsable --dependency="afterok:$array" --kill-on-invalid-dep=yes \
    "$here/slurm_merge.sbatch" "$shards" "$out" "$@")
echo "array $array, merge $merge"
