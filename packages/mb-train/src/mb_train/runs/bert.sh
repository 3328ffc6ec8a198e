#!/usr/bin/env bash
# A BERT as Megatron-LM's example scripts train it, dense or with experts.
#
#   bert.sh SIZE DATA [flags]            SIZE 110m or 345m; DATA as for --data-path, split into sentences
#   bert.sh 110m my_text_sentence --moe-num-experts 64 --moe-loss-weight 0.05
#
# GPUS, and several nodes, as launch.sh has it. On one GPU give --cuda-graph: these models wait
# for the host without.
set -euo pipefail
size=${1:?expected bert.sh SIZE DATA [flags]} data=${2:?expected bert.sh SIZE DATA [flags]}
shift 2
exec bash "$(dirname "$0")/launch.sh" --recipe "bert-$size" --data-path $data "$@"
