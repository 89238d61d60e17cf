#!/usr/bin/env bash
# GRPO on three nodes of eight GPUs under Slurm: a vLLM server on the first one, a ring on the others. New weights go
# through a folder on a disk that all nodes see. NCCL between the two would be faster, but then the trainer needs vLLM in
# its environment, and a server waits for ever for a trainer that died. The job ends with the trainer.
#
#     sbatch examples/cluster/grpo_slurm.sh examples/grpo.py Qwen/Qwen3-0.6B /shared --output /shared/grpo
#
# How many nodes a server needs, and what a hand-over takes: ringspan plan --rollouts 8.
#
#SBATCH --job-name=ringspan-grpo
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
set -euo pipefail

usage='usage: sbatch grpo_slurm.sh SCRIPT MODEL SHARED_FOLDER [option of the script ...]'
script=${1:?$usage}
model=${2:?$usage}
shared=${3:?$usage}
shift 3

# Jobs that share a node have ports of their own.
port=$((20000 + SLURM_JOB_ID % 10000 * 2))
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
server=${hosts[0]}
trainers=("${hosts[@]:1}")
weights=$(mktemp -d "$shared/weights.XXXXXX")
chmod 755 "$weights"

VLLM_SERVER_DEV_MODE=1 srun --nodes 1 --ntasks 1 --nodelist "$server" vllm serve "$model" \
    --port "$port" \
    --tensor-parallel-size "$SLURM_GPUS_ON_NODE" \
    --logprobs-mode processed_logprobs \
    --max-logprobs -1 &
serving=$!
trap 'kill "$serving" 2>/dev/null || true; wait "$serving" || true; rm -rf "$weights"' EXIT

# The trainer waits until the server has read its model.
srun --nodes "${#trainers[@]}" --ntasks "${#trainers[@]}" --nodelist "$(IFS=,; echo "${trainers[*]}")" \
    --kill-on-bad-exit=1 torchrun \
    --nnodes "${#trainers[@]}" \
    --nproc-per-node "$SLURM_GPUS_ON_NODE" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${trainers[0]}:$((port + 1))" \
    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    "$script" --model "$model" --server "http://$server:$port" --weights "$weights" "$@"
