#!/bin/sh
# Everything about whole-model decode that needs a GPU, in about 140 seconds: the engine's tests beside a run that compiles
# the kernels, then the decode benchmark. Goes on after a failure; JSON lines and logs go to $OUT.
OUT=${OUT:-bench/results}
export PYTHONPATH=. PYTHONUNBUFFERED=1
timeout "${TEST_SECONDS:-60}" python3 -m pytest -c /dev/null --rootdir . -p no:cacheprovider -v --tb=short \
    -k "graph or captured or waits or bf16" tests/engine/test_gpu.py >"$OUT/decode_tests.log" 2>&1 &
timeout "${WARM_SECONDS:-60}" python3 bench/decode.py --prompts 1024 5120 --tokens 7 --arms replay --no-gate \
    --out /dev/null >"$OUT/decode_warm.log" 2>&1
wait
grep -E "PASSED|FAILED|ERROR|^E  " "$OUT/decode_tests.log" | cut -c 1-150 | tail -n 30
tail -n 8 "$OUT/decode_warm.log" | cut -c 1-200
timeout "${BENCH_SECONDS:-85}" python3 bench/decode.py --prompts 1024 5120 --tokens 7 3 --profile --no-gate \
    --seconds $((${BENCH_SECONDS:-85} - 10)) ${COMMIT:+--commit $COMMIT} --out "$OUT/decode.jsonl" >"$OUT/decode.log" 2>&1
cut -c 1-180 "$OUT/decode.log" | tail -n 90
