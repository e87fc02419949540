#!/usr/bin/env bash
# Makes reports/largest_model.csv and reports/largest_model.md.
#
#   experiments/largest.sh
#
# FRAGLAB names the program, by default target/release/fraglab. Needs bash and python3. Takes two
# minutes; the same files come out each time, byte for byte.
set -euo pipefail
cd "$(dirname "$0")/.."

fraglab=${FRAGLAB:-target/release/fraglab}
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT

# PatrickStar's models by their parameters.
models=(GPT2_1B GPT2_2B GPT2_4B GPT3_6B GPT3_8B GPT3_10B GPT3_11B GPT3_12B GPT3_13B GPT3_15B
    GPT3_18B GPT_DS_20B GPT_DS_40B GPT_DS_50B GPT_DS_60B GPT_DS_68B GPT_175B)

# plan NAME MODEL ARGUMENT...: scratch/NAME.MODEL.json. Code 1 says that nothing fits: an answer.
plan() {
    local name=$1 model=$2 code=0
    shift 2
    "$fraglab" plan-chunks --model "$model" --json "$scratch/$name.$model.json" "$@" \
        >"$scratch/out" || code=$?
    if [[ $code -gt 1 ]]; then
        return $code
    fi
}

# The jobs: sequence 1024, checkpointing, memory-saving communication, GPU ADAM, and the chunk size
# of PatrickStar's scripts for the A100, which is not on its grid.
common=(--set train.sequence=1024 --use_ckp --with_mem_saving_com --use_hybrid_adam
    --chunk_size 384Mi)

while IFS=, read -r platform ranks local_ranks gpu host _; do
    [[ $platform != platform ]] || continue
    machine=(--gpu "$gpu" --host "$host" --ranks "$ranks" --local-ranks "$local_ranks")
    for model in "${models[@]}"; do
        for batch in 4 8 16; do
            plan "$platform.$ranks.batch$batch" "$model" "${machine[@]}" "${common[@]}" \
                --set train.batch=$batch
        done
        plan "$platform.$ranks.offload" "$model" "${machine[@]}" "${common[@]}" \
            --set train.batch=8 --with_activation_offload
        plan "$platform.$ranks.tiled" "$model" "${machine[@]}" "${common[@]}" \
            --set train.batch=8 --with_tiling_linear --use_cpu_embedding
    done
done <experiments/largest_published.csv

# The manager itself, on generated traces of the same jobs, models around the published ones: the
# chunk size that the plan chose or came nearest with. As we have it, and with PatrickStar's quirks,
# with its cache (as its script has it) and without.
mkdir "$scratch/generated"
cat >"$scratch/bert.toml" <<'TOML'
[model]
type = "bert"
layers = 1
hidden = 1024
heads = 16
positions = 1024
head = "classifier"
[train]
sequence = 1024
steps = 3
dtype = "fp16"
clip = false
[hardware]
gpu = "a100-40g"
[options]
use_ckp = true
TOML
python3 experiments/largest.py runs "$scratch" | while IFS=, read -r name shape gpu host size; do
    read -r hidden layers heads batch ranks local_ranks <<<"$shape"
    "$fraglab" gen "$scratch/bert.toml" --set "model.hidden=$hidden" --set "model.layers=$layers" \
        --set "model.heads=$heads" --set "train.batch=$batch" --set "parallel.data=$ranks" \
        --set "hardware.gpus_per_host=$local_ranks" -o "$scratch/generated/trace.json" >"$scratch/gen.out" 2>&1 \
        || { cat "$scratch/gen.out" >&2; exit 2; }
    common=chunk+chunk_size=$size+gpu=$gpu+host=$host+with_mem_saving_comm=true
    common+=+overall_gpu_mem_ratio=0.9+overall_cpu_mem_ratio=0.9
    for way in "" +quirks=true+with_mem_cache=true +quirks=true; do
        code=0
        "$fraglab" run --quiet --trace "$scratch/generated/trace.json" --capacity "$gpu" \
            --alloc "$common$way" --json "$scratch/$name$way.run" 2>"$scratch/error" || code=$?
        # A host that cannot hold the model at all is an answer too.
        if [[ $code -gt 1 ]] && ! grep -q "fit neither" "$scratch/error"; then
            cat "$scratch/error" >&2
            exit $code
        fi
    done
done

python3 experiments/largest.py pages "$scratch" reports
