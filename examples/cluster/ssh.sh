#!/usr/bin/env bash
# Nodes that ssh reaches, with the same folder: examples/cluster/ssh.sh "node1 node2" GPUS train.toml run=/shared/run
set -euo pipefail
read -ra nodes <<< "${1:?usage: ssh.sh \"HOST ...\" GPUS CONFIG [key=value ...]}"
gpus=${2:?usage: ssh.sh \"HOST ...\" GPUS CONFIG [key=value ...]}
shift 2
# An address: a name may have IPv6 first, where the others do not listen.
head=$(getent ahostsv4 "${nodes[0]}" | awk 'NR == 1 { print $1 }')
started=()
trap 'kill "${started[@]}" 2> /dev/null || true' EXIT INT TERM
for rank in "${!nodes[@]}"; do
    # A terminal (-tt) ends the ranks when this script ends.
    ssh -tt "${nodes[rank]}" cd "$(printf %q "$PWD")" "&&" TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \
        TORCH_FR_BUFFER_SIZE=2000 torchrun --nnodes "${#nodes[@]}" --node-rank "$rank" --nproc-per-node "$gpus" --max-restarts 3 \
        --master-addr "$head" --master-port 29500 -m ringspan train "$(printf '%q ' "$@")" < /dev/null &
    started+=($!)
done
for process in "${started[@]}"; do wait "$process"; done
