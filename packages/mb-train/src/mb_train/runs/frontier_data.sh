#!/usr/bin/env bash
# Token files of hundreds of megabytes from the texts that this machine has: no download is needed.
#
#   frontier_data.sh PREFIX [flags of mb-data machine-corpus]
#   frontier_data.sh data/machine
#   PACKAGES="sympy django" DOCUMENTS="linux-doc" frontier_data.sh data/machine
#
# makes PREFIX.jsonl and PREFIX_text_document.bin and .idx, and PREFIX.txt, which says how large it is, of
# what, its entropy under gzip, and the bytes of a token. PACKAGES (Python's) and DOCUMENTS (Debian's) are
# fetched by pip and apt-get and unpacked beside PREFIX, not installed. --split of a run parts it: the
# documents are shuffled by a seed already, near copies left out.
set -euo pipefail
prefix=$1
shift
mkdir -p "$(dirname "$prefix")"
more=()
if [ -n "${PACKAGES:-}" ]; then
    python -m pip install --quiet --no-deps --no-compile --target "$prefix.packages" $PACKAGES
    more+=(--add "fetched-packages=$prefix.packages")
fi
if [ -n "${DOCUMENTS:-}" ]; then
    mkdir -p "$prefix.documents"
    (cd "$prefix.documents" && apt-get download $DOCUMENTS && for deb in *.deb; do dpkg-deb -x "$deb" .; done)
    more+=(--add "fetched-documents=$prefix.documents")
fi
{
    mb-data machine-corpus "$prefix.jsonl" "${more[@]}" "$@"
    mb-data preprocess --input "$prefix.jsonl" --output-prefix "$prefix" --tokenizer gpt2 --append-eod \
        --restart --quiet
    mb-data inspect "${prefix}_text_document"
} | tee "$prefix.partial.txt"
# "38,318 documents, 195,699,259 tokens, 454,862,058 bytes of text; ..." of preprocess
awk -F', ' '/ tokens, .* bytes of text;/ {
    gsub(",", ""); split($0, w, " "); printf "%.3f bytes per token\n", w[5] / w[3]
}' "$prefix.partial.txt" | tee -a "$prefix.partial.txt"
mv "$prefix.partial.txt" "$prefix.txt"
