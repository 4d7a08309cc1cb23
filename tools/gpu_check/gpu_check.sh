#!/usr/bin/env bash
# Checks zeroshard on one GPU and writes $OUT/report.md, in at most 8 minutes. `bash tools/gpu_check/gpu_check.sh --help`
# lists the options; OUT, BUDGET_S, SLOW and WORKERS set their defaults.
exec "${PYTHON:-python3}" "$(dirname "$0")" "$@"
