#!/usr/bin/env bash
# Token files for a GPT from JSON Lines, the way AMD's post on MegaBlocks prepares its corpus: GPT-2's
# tokens, a token at the end of every document.
#
#   data.sh INPUT PREFIX [flags]         INPUT .jsonl, plain or .gz, .zst, .xz; flags of mb-data preprocess
#   data.sh oscar-1GB.jsonl.xz data/oscar
#
# makes PREFIX_text_document.bin and .idx: give PREFIX_text_document as --data-path. The post's corpus,
# oscar-1GB.jsonl.xz with 79,000 documents, is read as it is packed. GPT-2's vocabulary is inside mb-data
# and need not be fetched. Given - as INPUT this machine's Python library is the corpus.
set -euo pipefail
input=${1:?expected data.sh INPUT PREFIX [flags]} prefix=${2:?expected data.sh INPUT PREFIX [flags]}
shift 2
mkdir -p "$(dirname "$prefix")"
if [ "$input" = - ]; then
    input=$prefix.jsonl
    mb-data sample-corpus "$input"
fi
mb-data preprocess --input "$input" --output-prefix "$prefix" --tokenizer gpt2 --append-eod "$@"
mb-data inspect "${prefix}_text_document"
