#!/usr/bin/env bash
# A MoE GPT with expert capacity, the paper's baseline: its exp/moe scripts in this library's words.
#
#   moe.sh SIZE DATA [flags]             SIZE 46m, 125m or 356m; DATA as for --data-path
#   moe.sh 125m my_text_document --moe-capacity-factor 2
#
# GPUS, and several nodes, as launch.sh has it.
set -euo pipefail
size=${1:?expected moe.sh SIZE DATA [flags]} data=${2:?expected moe.sh SIZE DATA [flags]}
shift 2
exec bash "$(dirname "$0")/launch.sh" --recipe "moe-$size" --data-path $data "$@"
