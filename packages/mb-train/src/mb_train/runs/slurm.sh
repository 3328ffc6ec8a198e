#!/usr/bin/env bash
#SBATCH --job-name=mb-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
#SBATCH --requeue
# mb-train on the nodes of a Slurm job: one launcher on each, which starts one rank for each GPU.
#
#   sbatch --nodes 4 slurm.sh --recipe dmoe-125m --data-path my_text_document --save runs/a --load runs/a
#
# Two minutes before the time is up every rank gets SIGTERM, the run saves, and the job begins anew if
# the cluster requeues it: with --load equal to --save it goes on where it stopped. Options before the
# script's name overrule those above. Where sbatch copies scripts away, RUNS names their folder:
#   sbatch --export=ALL,RUNS=$PWD/runs slurm.sh ...
set -euo pipefail
if [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "slurm.sh: expected a job of Slurm's, got none. Start it by sbatch, or launch.sh without Slurm." >&2
    exit 2
fi
export NNODES=$SLURM_NNODES
export GPUS=${SLURM_GPUS_ON_NODE:-${GPUS:-8}}
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${nodes%%$'\n'*}
# Jobs that share a node need ports of their own.
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
# From Slurm 22.05 on srun does not take this over, and a launcher with all its ranks may get one core.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
export RUNS=${RUNS:-$(python -c 'import os, mb_train; print(os.path.dirname(mb_train.__file__))')/runs}
exec srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$RUNS/launch.sh" "$@"' _ "$@"
