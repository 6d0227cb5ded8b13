#!/bin/bash
# A sweep on SLURM: starts a Ray cluster on the allocated nodes, runs rlx on it, and ends it.
#   sbatch deploy/slurm.sh --name lr --trials 16 --storage /nfs/rlx
# Run it again with --resume lr after the time limit. SIGTERM, a minute before, ends the trials at once: they continue from
# their newest checkpoints, so keep --checkpoint.every short enough.
#SBATCH --job-name=rlx
#SBATCH --nodes=4
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@60
set -euo pipefail

# All processes of this cluster, and nobody else's, know its token.
RAY_AUTH_TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # since SLURM 22.05 srun does not take it from the job

port=6379
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=${nodes[0]}
# Its first IPv4 address. `hostname --ip-address` could give 127.0.1.1, from Debian's /etc/hosts.
for address in $(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --all-ip-addresses); do
    if [[ $address != *:* ]]; then break; fi
done

# Each node starts Ray and waits; the head first, since the others join it.
start() { ray start --block --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" "$@"; }
export -f start
srun --nodes=1 --ntasks=1 --nodelist="$head" bash -c "start --head --node-ip-address=$address --port=$port" &
until ray status --address="$address:$port" >/dev/null 2>&1; do
    kill -0 $! 2>/dev/null || { echo "error: Ray's head on $head has ended" >&2; exit 1; }
    sleep 2
done
if (( SLURM_JOB_NUM_NODES > 1 )); then
    srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head" \
        bash -c "start --address=$address:$port" &
fi

# exec: SLURM's SIGTERM reaches rlx alone. --wait-for-resources: nodes may join some seconds later.
export RAY_ADDRESS="$address:$port"
exec rlx sweep --wait-for-resources 600 "$@"
