#!/bin/bash
# A sweep on SLURM: starts a Ray cluster on the allocated nodes, runs rlx on it, and ends it.
#   sbatch deploy/slurm.sh --name lr --trials 16 --storage /nfs/rlx
# Run it again with --resume lr after the time limit. SIGTERM, a minute before, ends the trials at once: they continue from
# their newest checkpoints, so keep --checkpoint.every short enough.
#SBATCH --job-name=rlx
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@60
set -euo pipefail

port=6379
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')

# Each node starts Ray and waits; the head first, since the others join it.
start() { ray start --block --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" "$@"; }
export -f start
srun --nodes=1 --ntasks=1 --nodelist="$head" bash -c "start --head --node-ip-address=$address --port=$port" &
until ray status --address="$address:$port" >/dev/null 2>&1; do sleep 2; done
if (( SLURM_JOB_NUM_NODES > 1 )); then
    srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head" \
        bash -c "start --address=$address:$port" &
fi

# exec: SLURM's SIGTERM reaches rlx alone. --wait-for-resources: nodes may join some seconds later.
export RAY_ADDRESS="$address:$port"
exec rlx sweep --wait-for-resources 600 "$@"
