LAYERS=6
DENSE=1
freq=()
for ((i = 0; i < LAYERS; i++)); do
    if ((i < DENSE)); then freq+=(0); else freq+=(1); fi
done
printf -v FREQUENCY "[%s]" "$(IFS=','; echo "${freq[*]}")"
MODEL_ARGS=(
    --num-layers $LAYERS
    --hidden-size $((16 * 64))
    --num-attention-heads 16
    --rotary-base "${ROTARY_BASE:-10000}"
    --moe-layer-freq "$FREQUENCY"   # dense first
    --pattern [0]*$DENSE+[1]*$((LAYERS - DENSE))
    --swiglu
)
