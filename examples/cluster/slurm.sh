#!/usr/bin/env bash
# Two nodes of eight GPUs under Slurm. 120 s before the time limit, or when it is pre-empted, Slurm signals every
# process; the ranks agree on a step, save it and end, and the job is put back into the queue. The same command then
# goes on from the newest valid checkpoint, on however many nodes there are.
#
#     sbatch examples/cluster/slurm.sh examples/finetune.toml runs/finetune
#
#SBATCH --job-name=ringspan
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=SIGUSR1@120
set -euo pipefail

config=${1:?usage: sbatch slurm.sh CONFIG RUN [key=value ...]}
run=${2:?usage: sbatch slurm.sh CONFIG RUN [key=value ...]}
shift 2
latest() { cat "$run/checkpoints/latest" 2>/dev/null || true; }

# A new attempt must not be handed the addresses of the one before.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# What torchrun gives its ranks to save in, before it kills them.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110
# The last calls of every rank, which the watchdog writes into the run's folder when it ends the run.
export TORCH_FR_BUFFER_SIZE=2000
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

before=$(latest)
code=0
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node 8 \
    --max-restarts 3 \
    --signals-to-handle SIGTERM,SIGINT,SIGUSR1 \
    --rdzv-backend c10d \
    --rdzv-endpoint "$head:29500" \
    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    -m ringspan train "$config" "run=$run" "$@" || code=$?

# Not finished: back into the queue, as long as it got anywhere since it was started.
if [ "$code" -ne 0 ] && [ "$before" != "$(latest)" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
