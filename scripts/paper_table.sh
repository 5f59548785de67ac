#!/usr/bin/env bash
# The paper's table on one machine: what micro-batches cost, then each policy with kernels off and on, all blocks
# recomputed and as few as fit, ranks meeting every slot and every step; HSDP beside FSDP; what the models predict.
#   scripts/paper_table.sh NUM_GPUS OUTPUT [CONFIG [key=value ...]]
# Run it from the repository with its environment active. Variables, with defaults: LIMIT (105600) tokens, which goes
# before any schedule.memory_limit_tokens; null is what fits. For 14B set LIMIT=51000 and RECOMPUTE=full. GPU (h200) of
# the prediction, as in cost.gpu: name yours. MIX, ACCELERATE (its configuration), SCAN_MINUTES (9), SCAN_OPTIONS,
# TABLE_MINUTES (9), SAMPLES_PER_RANK (28), STEPS (12), KERNELS, RECOMPUTE, MEET, PEER (empty: none), and STAGES of
# "scan table hsdp predict": a later call can do the rest, with the OUTPUT/cost-*.yaml of the scan.
set -euo pipefail
gpus=$1 output=$2 config=${3:-configs/wan_1_3b.yaml}
overrides=("${@:4}" "schedule.memory_limit_tokens=${LIMIT:-105600}")
mix=${MIX:-configs/mixes/mixed.yaml} stages=" ${STAGES:-scan table hsdp predict} "
mkdir -p "$output"

launch() {
    python -m scripts.launch --config_file "${ACCELERATE:-configs/accelerate/1node.yaml}" --num_processes "$gpus" -m "$@"
}

policies() {  # OUTPUT [option ...]
    launch scripts.benchmark_policies "$config" "${overrides[@]}" --mix "$mix" --cost "$output"/cost-*.yaml \
        --samples-per-rank "${SAMPLES_PER_RANK:-28}" --steps "${STEPS:-12}" --budget-minutes "${TABLE_MINUTES:-9}" \
        --output "$output/$1" "${@:2}"
}

if [[ $stages == *" scan "* ]]; then
    # shellcheck disable=SC2086 # options
    launch scripts.benchmark_shapes "$config" "${overrides[@]}" --output "$output/scan.parquet" \
        --recompute none full --budget-minutes "${SCAN_MINUTES:-9}" ${SCAN_OPTIONS:-}
    for level in none full; do
        python -m scripts.fit_cost_model "$output/scan.parquet" --recompute $level --output "$output/cost-$level.yaml" \
            --mix "$mix"
    done
fi
if [[ $stages == *" table "* ]]; then
    # shellcheck disable=SC2086 # lists
    policies table --kernels ${KERNELS:-reference cuda} --recompute ${RECOMPUTE:-full auto} --meet ${MEET:-slot step} \
        ${PEER---peer}
fi
if [[ $stages == *" hsdp "* ]] && ((gpus % 2 == 0)); then
    policies fsdp --policies balanced --meet slot
    policies hsdp schedule.shard_ranks=$((gpus / 2)) --policies balanced --meet slot
fi
if [[ $stages == *" predict "* ]]; then
    # shellcheck disable=SC2086 # lists
    python -m scripts.benchmark_policies "$config" "cost.gpu=${GPU:-h200}" "${overrides[@]}" --mix "$mix" --cost "$output"/cost-*.yaml \
        --dry-run --ranks "$gpus" --samples-per-rank "${SAMPLES_PER_RANK:-28}" --steps 48 \
        --recompute ${RECOMPUTE:-full auto} --meet ${MEET:-slot step} --output "$output/predicted"
fi
