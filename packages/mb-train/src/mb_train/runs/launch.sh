#!/usr/bin/env bash
# Starts mb-train on every GPU of this node, and on those of other nodes that do the same.
#
#   launch.sh [flags]                    as of mb-train
#   GPUS=1 launch.sh --recipe dense-125m --data-path my_text_document
#
# On several nodes run the same line on each, with
#   NNODES       how many nodes there are (default 1)
#   NODE_RANK    which of them this is, counted from 0
#   MASTER_ADDR  the name or address of node 0, as the others reach it
#   MASTER_PORT  a free port there (default 29500)
# GPUS is the number of GPUs on each node (default 8). See docs/several-nodes.md.
#
# A signal to torchrun goes on to the ranks, which save and stop. Left alone, torchrun kills them 30 s later,
# in the middle of a large checkpoint, and dies of SIGUSR1 without telling them. Two minutes are what
# slurm.sh asks for before a job's end; so long the others also wait for a rank that has failed.
set -euo pipefail
nodes=${NNODES:-1}
where=(--standalone)
if [ "$nodes" != 1 ]; then
    for name in NODE_RANK MASTER_ADDR; do
        if [ -z "${!name:-}" ]; then
            echo "launch.sh: expected $name with NNODES=$nodes, got none" >&2
            exit 2
        fi
    done
    where=(--nnodes "$nodes" --node_rank "$NODE_RANK"
        --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}")
fi
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}
export PET_SIGNALS_TO_HANDLE=${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}
exec torchrun "${where[@]}" --nproc_per_node "${GPUS:-8}" -m mb_train "$@"
