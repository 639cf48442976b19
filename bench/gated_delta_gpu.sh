#!/bin/sh
# Everything about the portable Gated DeltaNet kernels that needs a GPU, in about two minutes: their tests, their cuts,
# and the operator benchmark with the baselines. Goes on after a failure; JSON lines and logs go to $OUT.
OUT=${OUT:-bench/results}
export PYTHONUNBUFFERED=1
tests="replay full_state replay_ssm layer_step"
files=$(for name in $tests; do echo "tests/ops/gated_delta/test_$name.py"; done)
timeout 90 python3 -m pytest -c /dev/null --rootdir . -p no:cacheprovider -q --tb=short ${WORKERS:+-n $WORKERS} $files \
    >"$OUT/gated_delta_tests.log" 2>&1
tail -n 8 "$OUT/gated_delta_tests.log"
timeout 60 python3 bench/tune.py --what replay layer_step --best 2 --out "$OUT/tune.jsonl" >"$OUT/tune.log" 2>&1
grep -A 1 -E "^(replay|layer_step) |WRONG|Error" "$OUT/tune.log" | grep -v "^--" | cut -c 1-110
arms=replay_triton,full_state_copy,full_state_read_parent,full_state_read_parent_bf16,replay_ssm,replay_ssm_shared
timeout 70 python3 bench/operator.py --arms $arms --requests 16 4 --widths 512 --outputs 3 ${COMMIT:+--commit $COMMIT} \
    --out "$OUT/operator.jsonl" >"$OUT/operator.log" 2>&1
grep -E " time |error|WRONG|Error" "$OUT/operator.log"
