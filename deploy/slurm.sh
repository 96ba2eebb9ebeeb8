#!/bin/bash
# A job whose nodes share one cache: a daemon on each node, which ends with the job.
#
#   sbatch slurm.sh python train.py
#
# CACHESVC_TLS_CERT, CACHESVC_TLS_KEY and CACHESVC_TLS_CA name the nodes' certificate, its key and the authority: PEM files
# that all nodes see.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
set -euo pipefail

export CACHESVC_SOCKET="/tmp/cachesvc-$SLURM_JOB_ID"
export CACHESVC_STATE_DIR="$CACHESVC_SOCKET/state"
export CACHESVC=require # training does not begin without its cache
on_each_node=(srun --overlap --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1)

# Fails where another user made it.
"${on_each_node[@]}" mkdir -m 0700 "$CACHESVC_SOCKET"
"${on_each_node[@]}" cachesvc serve --ram 64GiB --allow s3://bucket/ \
    --cluster "static:$SLURM_JOB_NODELIST:7070" &
daemons=$!
stop() {
    # srun passes the signal on to the daemons, and ends when all have ended.
    kill "$daemons" 2>/dev/null && wait "$daemons"
    "${on_each_node[@]}" rm -rf "$CACHESVC_SOCKET"
}
trap 'stop || true' EXIT

"${on_each_node[@]}" timeout 120 sh -c 'until cachesvc status >/dev/null 2>&1; do sleep 1; done'

srun --overlap "$@"
