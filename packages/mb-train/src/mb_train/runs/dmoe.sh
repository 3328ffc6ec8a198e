#!/usr/bin/env bash
# A dropless MoE GPT of the MegaBlocks paper: its exp/dmoe scripts in this library's words.
#
#   dmoe.sh SIZE DATA [flags]            SIZE 46m, 125m, 356m or 760m; DATA as for --data-path
#   dmoe.sh 125m my_text_document --moe-num-experts 128 --moe-top-k 2 --moe-loss-weight 0.05
#
# GPUS, and several nodes, as launch.sh has it.
set -euo pipefail
size=${1:?expected dmoe.sh SIZE DATA [flags]} data=${2:?expected dmoe.sh SIZE DATA [flags]}
shift 2
exec bash "$(dirname "$0")/launch.sh" --recipe "dmoe-$size" --data-path $data "$@"
