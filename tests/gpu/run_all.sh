#!/usr/bin/env bash
# Everything that needs a GPU: correctness matrix, bitwise repeatability, processes, emulator agreement, sanitizer, speed
# next to cuDNN and, on two GPUs or more, sequence parallelism. Tables and logs go to the folder $1; further arguments
# name the parts to run (default: all): correctness emulator sanitizer speed figures two.
#
# Run in the checkout, with the launcher built (python -m jax_fa4.ffi.build) and compiled kernels in jax_fa4/artefacts
# (python -m jax_fa4 compile --arch sm_90a --out jax_fa4/artefacts, on any machine with the DSL). Every part is meant to
# take less than ten minutes on 16 cores; every step has a time limit, and one that fails does not keep the others from
# running.
set -u
out=${1:?usage: run_all.sh FOLDER [PART...]}
shift
parts=" ${*:-correctness emulator sanitizer speed figures two} "
mkdir -p "$out"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
say() { printf '=== [%4d s] %s\n' "$SECONDS" "$*"; }
tests() { timeout -s INT -k 5 "$1" python3 -m pytest --tb=line -p no:cacheprovider "${@:3}" >"$out/$2.txt" 2>&1; tail -n 3 "$out/$2.txt"; }

wanted() { [[ $parts == *" $1 "* ]]; }

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
if wanted correctness; then
  (
    # Many small processes: they must not each take most of the memory.
    export XLA_PYTHON_CLIENT_PREALLOCATE=false
    say "1,000 calls bitwise; processes, export, caches, command buffers"
    tests 180 bitwise -n 4 -rP tests/gpu/test_attention.py tests/gpu/test_processes.py -k "bitwise or processes"
    say "matrix against NumPy float64"
    tests 390 matrix -n "$(nproc)" tests/gpu/test_attention.py -k "not bitwise"
  )
fi
if wanted emulator; then
  (
    export XLA_PYTHON_CLIENT_PREALLOCATE=false
    say "the emulator's bits"
    timeout 240 python3 -m tests.gpu.emulator_agreement --folder jax_fa4/artefacts \
      --save "$out/agreement" >"$out/agreement.txt" 2>&1
    tail -n 8 "$out/agreement.txt"
    timeout 60 python3 -m tests.gpu.tensor_core_probe --save "$out/probe.npz" >"$out/probe.txt" 2>&1
    tail -n 3 "$out/probe.txt"
  )
fi
if wanted sanitizer; then
  for tool in memcheck racecheck synccheck; do
    for direction in forward backward; do
      say "compute-sanitizer $tool, $direction"
      timeout 90 compute-sanitizer --tool $tool --report-api-errors no python3 -m "tests.gpu.${direction}_bench" check \
        --folder jax_fa4/artefacts --count 12 >"$out/$tool-$direction.txt" 2>&1
      tail -n 2 "$out/$tool-$direction.txt"
    done
  done
fi
if wanted speed; then
  say "speed"
  timeout 480 python3 benchmarks/attention.py --gqa --out "$out/attention.md" >"$out/attention.txt" 2>&1
  tail -n 70 "$out/attention.txt"
fi
if wanted figures; then
  say "launch overhead"
  timeout 150 python3 benchmarks/launch_overhead.py --out "$out/launch_overhead.md"
  say "short grouped queries"
  timeout 100 python3 benchmarks/decoding.py --out "$out/decoding.md"
  say "memory"
  timeout 200 python3 benchmarks/memory.py --out "$out/memory.md"
  say "selftest"
  timeout 200 python3 -m jax_fa4 selftest --quick --json "$out/selftest.json" | tail -n 12
fi
if wanted two && [ "$(nvidia-smi -L | wc -l)" -ge 2 ]; then
  export XLA_PYTHON_CLIENT_PREALLOCATE=false
  say "two GPUs"
  tests 120 two -n 4 tests/gpu/test_two_gpus.py tests/gpu/test_processes.py -k two
  timeout 200 python3 benchmarks/parallel.py --repeat 20 --trace "$out/profiles" --csv "$out/parallel.csv" \
    --out "$out/parallel.md" >"$out/parallel.txt" 2>&1
  cat "$out/parallel.txt"
fi
say "done"
