#!/usr/bin/env bash
# The frontier of validation loss against training time: dense models, MoEs with capacity factor 1, 1.5
# and 2, dMoEs (64 experts, top-1), and dMoEs of four times as many experts a quarter as wide, four for a
# token, each size trained once to the end of its schedule.
#
#   frontier.sh --data PREFIX --out FOLDER [options] [POINT ...] [-- flags of mb-train]
#   frontier.sh --data data/machine_text_document --out runs/frontier --minutes 9
#
#   --tokens N      tokens of every point (419,430,400), rounded down to whole steps
#   --gpus N        of this host, each with a share of the sequences and of the experts (1)
#   --sequences N   in a step (256), in micro-batches of 128 (356m: 64) if those divide a GPU's
#   --length N      tokens of a sequence (1024)
#   --minutes M     stop after so many: the point under way saves, and the same line goes on with it
#   --keep          keep the checkpoints of finished points; a dmoe-125m is 27 GB
#   --dry-run       say what would be run, and what mb-train plan says of it
#   --gpu NAME      the GPU to plan for (H200, ...), if it is not the one here
#   POINT           FAMILY-SIZE, of families dense, moe1, moe1.5, moe2, dmoe, fine and the recipes' sizes
#                   or 154m (125m with 16 layers), with @SEED for another seed; default 17m, 46m, 125m of
#                   all, dense-46m and dmoe-46m with a second seed, and dense-154m and dense-356m, so that
#                   the dense curve reaches the losses of experts
#
# All points see the same sequences in the same order, in steps of 256, half the paper's, with Muon,
# which after 800 steps of 128 is 0.3 ahead of Adam, with experts and without. The schedule is the
# paper's, scaled: cosine to a tenth, clipping at 1; warm-up is a tenth, since there are few steps, and
# dropout is 0. First weights are wider (0.04) than the paper's 0.01, from which small
# dense models hardly learn in so few steps. Of models with experts the first layer is dense: a router there
# hardly decides, sends most of the text to one expert, and cost 0.04 and one run of two. One expert of 64 is
# weighed by 8 times its softmax score, which begins near 0.1, and such routers learn at a tenth of the
# rate. The four of `fine` share a weight of 1, and their routers learn at the full rate, which is 0.01 better
# there. The balance loss weighs 0.01, weights decay by 0.1. Peak rates by size: LR_17M, LR_46M, LR_125M, LR_154M
# and LR_356M (8e-3, 6e-3, 4e-3, 4e-3 and 3e-3; only the first is tuned), times LR_EXPERTS (1) for those with
# experts. An evaluation reads 4 million tokens: from one set of a million to another the difference of two
# models moved by 0.015. What each is worth: benchmarks/results, frontier.
#
# A point that finished is not run again. One that was stopped goes on from its checkpoint, to the step.
# At the end, and after every point, mb-train report --frontier draws what there is.
set -euo pipefail
if ! command -v mb-train >/dev/null; then mb-train() { python -m mb_train "$@"; }; fi # not installed: PYTHONPATH
data= out= gpus=1 tokens=419430400 sequences=256 minutes= keep= dry= gpu=() length=1024
points=()
while [ $# -gt 0 ]; do
    case $1 in
        --data) data=$2; shift ;;
        --out) out=$2; shift ;;
        --gpus) gpus=$2; shift ;;
        --tokens) tokens=$2; shift ;;
        --sequences) sequences=$2; shift ;;
        --length) length=$2; shift ;;
        --minutes) minutes=$2; shift ;;
        --keep) keep=1 ;;
        --dry-run) dry=1 ;;
        --gpu) gpu=(--gpu "$2"); shift ;;
        --) shift; break ;;
        -*) echo "frontier.sh: expected one of the options at the top of $0, got $1" >&2; exit 2 ;;
        *) points+=("$1") ;;
    esac
    shift
done
if [ -z "$data" ] || [ -z "$out" ]; then
    echo "frontier.sh: expected --data PREFIX and --out FOLDER, got '$data' and '$out'" >&2
    exit 2
fi
if [ "$gpus" -lt 1 ] || [ $((sequences % gpus)) != 0 ]; then
    echo "frontier.sh: expected --sequences that $gpus GPUs can share, got $sequences" >&2
    exit 2
fi
own=$((sequences / gpus)) # of a GPU
steps=$((tokens / (sequences * length)))
every=$((steps / 10 > 0 ? steps / 10 : 1))
steps=$((every * (steps / every))) # the last evaluation is at the end
if [ "$steps" -lt 1 ]; then
    echo "frontier.sh: expected --tokens of a step, $((sequences * length)), or more, got $tokens" >&2
    exit 2
fi
if [ ${#points[@]} = 0 ]; then
    for size in 17m 46m 125m; do points+=({dense,dmoe,fine,moe1,moe1.5,moe2}-$size); done
    points+=(dense-46m@2 dmoe-46m@2 dense-154m dense-356m)
fi

flags_of() { # FAMILY SIZE SEED: flags that make a point, one per line
    local rate=LR_${2^^} scale=1 size=$2 quarter # of a feed-forward layer's width
    local most=128                               # sequences of a micro-batch
    case $2 in
        17m) rate=${!rate:-8e-3} quarter=256 ;;
        46m) rate=${!rate:-6e-3} quarter=512 ;;
        125m) rate=${!rate:-4e-3} quarter=768 ;;
        154m) rate=${!rate:-4e-3} quarter=768 size=125m ;;
        356m) rate=${!rate:-3e-3} quarter=1024 most=64 ;; # 55 GiB, of a dense one
        *) echo "frontier.sh: expected the size 17m, 46m, 125m, 154m or 356m, got $2" >&2; exit 2 ;;
    esac
    case $1 in
        dense) printf '%s\n' --recipe "dense-$size" ;;
        dmoe | fine) printf '%s\n' --recipe "dmoe-$size" ;;
        moe*) printf '%s\n' --recipe "moe-$size" --moe-capacity-factor "${1#moe}" ;;
        *) echo "frontier.sh: expected dense, dmoe, fine or moeFACTOR before the size, got $1" >&2; exit 2 ;;
    esac
    if [ "$2" = 154m ]; then printf '%s\n' --num-layers 16; fi
    case $1 in
        dense) ;;
        fine)
            printf '%s\n' --moe-num-experts 256 --moe-ffn-hidden-size "$quarter" --moe-top-k 4 --moe-renormalize
            ;;
        *) printf '%s\n' --moe-router-topk-scaling-factor 8 --moe-router-lr-mult 0.1 ;;
    esac
    if [ "$1" != dense ]; then
        scale=${LR_EXPERTS:-1}
        printf '%s\n' --moe-loss-weight 0.01 --moe-first-k-dense 1 --expert-model-parallel-size "$gpus"
    fi
    awk -v r="$rate" -v s="$scale" 'BEGIN { printf "--lr\n%g\n--min-lr\n%g\n", r * s, r * s / 10 }'
    printf '%s\n' --seed "${3:-1234}" --data-path "$data" --train-iters "$steps" --optimizer muon \
        --seq-length "$length" --max-position-embeddings "$length" \
        --micro-batch-size "$((own % most ? own : most))" --global-batch-size "$sequences" \
        --init-method-std 0.04 --adam-beta2 0.95 --weight-decay 0.1 --lr-warmup-fraction 0.1 --split 969,16,15 \
        --attention-dropout 0 --hidden-dropout 0 --log-interval "$((every / 5 > 0 ? every / 5 : 1))" \
        --eval-interval "$every" --eval-iters "$((sequences < 4096 ? 4096 / sequences : 1))" \
        --save-interval "$steps"
}

reached() { # step of the last checkpoint of the point
    local file=$folder/latest_checkpointed_iteration.txt
    if [ -e "$file" ]; then cat "$file"; else echo 0; fi
}

told() { # whether the loss at the end of the point is in its log
    grep -qs "\"event\": \"eval\", \"iteration\": $steps," "$folder/log.jsonl"
}

draw() {
    local folder runs=()
    for folder in "$out"/*/; do
        if [ -e "$folder/finished" ]; then runs+=("$folder"); fi
    done
    if [ ${#runs[@]} != 0 ]; then mb-train report --frontier "${runs[@]}" --output "$out"; fi
}

for point in "${points[@]}"; do
    name=${point%@*} seed=
    if [[ $point == *@* ]]; then seed=${point#*@}; fi
    folder=$out/$point
    listed=$(flags_of "${name%-*}" "${name##*-}" "$seed")
    mapfile -t flags <<<"$listed"
    flags+=("$@" --save "$folder")
    if [ -n "$dry" ]; then
        echo "mb-train ${flags[*]}"
        mb-train plan --gpus "$gpus" "${gpu[@]}" "${flags[@]}" | sed 's/^/    /'
        continue
    fi
    if [ -e "$folder/finished" ]; then
        echo "$point: finished before"
        continue
    fi
    if [ "$(reached)" != "$steps" ]; then # a finished run that is loaded would go on for its length again
        if [ -n "$minutes" ]; then
            left=$(awk -v m="$minutes" -v s="$SECONDS" 'BEGIN { printf "%.2f", m - s / 60 }')
            if [[ $left == -* || $left == 0.00 ]]; then echo "$point: no time left"; break; fi
            flags+=(--exit-duration-in-mins "$left")
        fi
        if [ "$(reached)" != 0 ]; then flags+=(--load "$folder"); fi
        echo "$point: $steps steps of $sequences x $length tokens"
        if [ "$gpus" = 1 ]; then
            mb-train "${flags[@]}"
        else
            GPUS=$gpus bash "$(dirname "$0")/launch.sh" "${flags[@]}"
        fi
    fi
    if [ "$(reached)" != "$steps" ]; then
        echo "$point: stopped at step $(reached) of $steps; the same command goes on"
        break
    fi
    if ! told; then # a signal came in the evaluation
        echo "$point: its last loss was not measured; remove $folder to train it again"
        continue
    fi
    touch "$folder/finished"
    if [ -z "$keep" ]; then rm -rf "$folder"/iter_*; fi
    draw
done
