#!/usr/bin/env bash
# A retriever whose two towers begin from a BERT.
#
#   ict.sh BERT DATA [flags]             BERT a run folder; DATA a prefix, split into sentences
#   ict.sh runs/bert-110m my_text_sentence --titles-data-path my_title_document
#
# GPUS, and several nodes, as launch.sh has it. On one GPU give --cuda-graph: these models wait
# for the host without.
set -euo pipefail
bert=${1:?expected ict.sh BERT DATA [flags]} data=${2:?expected ict.sh BERT DATA [flags]}
shift 2
exec bash "$(dirname "$0")/launch.sh" --recipe ict-bert --bert-load "$bert" --data-path "$data" "$@"
