torchrun --nproc_per_node "$2" "$(realpath ./train_grpo.py)" "$@" \
    --stem "${0##*/}" --quoted "it's \"so\"" --path ~/models --ansi $'a\tb'
