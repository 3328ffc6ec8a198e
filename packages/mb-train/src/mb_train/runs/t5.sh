#!/usr/bin/env bash
# A T5 as Megatron-LM's example script trains it, dense or with experts.
#
#   t5.sh DATA [flags]                   DATA as for --data-path, split into sentences
#   t5.sh my_text_sentence --position-embedding-type relative
#
# GPUS, and several nodes, as launch.sh has it. On one GPU give --cuda-graph: these models wait
# for the host without.
set -euo pipefail
data=${1:?expected t5.sh DATA [flags]}
shift
exec bash "$(dirname "$0")/launch.sh" --recipe t5-220m --data-path $data "$@"
