#!/bin/bash
# A script that calls another one, with settings that follow from loops and text.
cd "$(dirname "$0")"
sizes="1 2 4"
total=0
for size in $sizes; do total=$((total + size)); done
declare -A TOKENS=([small]=4096 [large]=16384)
IFS=',' read -ra CARDS <<< "${CARDS:-0,1,2,3,4,5,6,7}"
set -- "x=${TOKENS[large]}" "$@"
bash ./inner.sh --cards "${#CARDS[@]}" --total "$total" "${@:2}" \
    --name "run_{a,b}" --files part-{1..3}.jsonl --words "${sizes// /-}" --up "${USERNAME_HERE:=abc}"
