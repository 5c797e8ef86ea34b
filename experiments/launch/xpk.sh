#!/bin/bash
# GKE through XPK (https://github.com/AI-Hypercomputer/xpk), which writes the JobSet itself:
#   CLUSTER=... IMAGE=... experiments/launch/xpk.sh --recipe llama_1b --set data.source=/data --out /checkpoints/llama_1b
# Arguments go to experiments.train_lm; the image is a clone with pip install -e ".[tpu]", and that as working directory.
set -euo pipefail
xpk workload create \
    --cluster "${CLUSTER:?the name of an XPK cluster}" \
    --workload "${WORKLOAD:-meshpar}" \
    --tpu-type "${TPU_TYPE:-v5litepod-64}" \
    --num-slices "${SLICES:-1}" \
    --docker-image "${IMAGE:?an image with meshpar}" \
    --max-restarts "${MAX_RESTARTS:-10}" \
    --command "python -m experiments.train_lm$(printf ' %q' "$@")"
