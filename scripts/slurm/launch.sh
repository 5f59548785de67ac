#!/usr/bin/env bash
# Becomes the srun that starts scripts.launch on every node of this job; the arguments are what that shall run, as
# `accelerate launch` takes it: `train.py CONFIG ...` or `-m scripts.benchmark_shapes CONFIG ...`.
# The environment is .venv (`make env`), or set VENV. One process a GPU; NUM_PROCESSES on each node without GPUs.
set -euo pipefail
source "${VENV:-.venv}/bin/activate"

nodes=$SLURM_JOB_NUM_NODES
if [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then
    per_node=$SLURM_GPUS_ON_NODE file=1node
    [ "$per_node" -gt 1 ] || file=1gpu
    [ "$nodes" -eq 1 ] || file=nodes
else
    per_node=${NUM_PROCESSES:-2} file=cpu
fi
launch=(--config_file "configs/accelerate/$file.yaml" --num_processes $((nodes * per_node)))
if [ "$nodes" -gt 1 ]; then
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    launch+=(--num_machines "$nodes" --main_process_ip "$address")
    # Two jobs on a node seldom have the same, and systems hand out none below 32768 by themselves.
    launch+=(--main_process_port $((15000 + SLURM_JOB_ID % 15000)))
fi
# Where a launcher has ended, the others have a minute: a rank that is stopped or cut off hears of nothing.
exec srun --wait=60 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
    bash -c 'exec python -m scripts.launch --machine_rank "$SLURM_NODEID" "$@"' launch "${launch[@]}" "$@"
