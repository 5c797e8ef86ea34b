#!/bin/bash
# SLURM, GPUs: sbatch experiments/launch/slurm.sh --recipe llama_125m --set mesh="data=2 fsdp=8" --set data.source=FOLDER
# Arguments go to experiments.train_lm. One process a node with all its GPUs; --ntasks-per-node=8 --gpus-per-task=1 gives
# each GPU a process of its own. join() reads the rest from the variables that srun sets.
#SBATCH --job-name=meshpar
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --requeue               # after a node failed, the same job starts again, in the same run folder
#SBATCH --signal=TERM@120       # two minutes before the time is up each process is told, to save and stop
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this file with sbatch}"

# a disk that all nodes see: checkpoints are written by all of them, and a requeued job goes on from the newest
RUN="${RUN:-$PWD/runs/slurm-$SLURM_JOB_ID}"

# --kill-on-bad-exit: when one process dies, the others end at once and not after jax's heartbeat
srun --label --kill-on-bad-exit=1 "${PYTHON:-python}" -m experiments.train_lm --out "$RUN" "$@"
