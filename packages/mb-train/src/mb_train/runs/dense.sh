#!/usr/bin/env bash
# A dense GPT of the MegaBlocks paper: its exp/gpt2 scripts in this library's words.
#
#   dense.sh SIZE DATA [flags]           SIZE 46m, 125m, 356m, 760m or 1315m; DATA as for --data-path
#   GPUS=1 dense.sh 125m my_text_document --train-iters 2000
#
# One GPU trains at the paper's single-GPU rate and micro-batch, several at those for eight; several
# nodes as launch.sh has it.
set -euo pipefail
size=${1:?expected dense.sh SIZE DATA [flags]} data=${2:?expected dense.sh SIZE DATA [flags]}
shift 2
recipe=dense-$size
if [ "${GPUS:-8}" = 1 ] && [ "${NNODES:-1}" = 1 ]; then recipe=$recipe-1gpu; fi
# DATA unquoted: weights and prefixes by turns are words of their own.
exec bash "$(dirname "$0")/launch.sh" --recipe "$recipe" --data-path $data "$@"
