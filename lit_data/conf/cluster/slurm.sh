#!/bin/bash
# Trains on the GPUs of several machines under SLURM, and goes on by itself where a time limit or a preemption stopped it.
#
#   sbatch conf/cluster/slurm.sh experiment=stripe trainer=ddp data.loader.global_batch_size=512
#   sbatch --nodes=8 --ntasks-per-node=4 --gres=gpu:4 conf/cluster/slurm.sh experiment=stripe trainer=fsdp
#
# One task is one rank, so --ntasks-per-node is the number of GPUs of a machine. Lightning reads the rest from SLURM.
#SBATCH --job-name=lit_data
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out

set -u

# One folder for all starts of the job, so that a start finds what the one before has saved.
run="${LIT_DATA_RUN:-$PWD/runs/fit/slurm_$SLURM_JOB_ID}"
interrupted="$run/checkpoints/interrupted.ckpt"
words=("$@" "hydra.run.dir='${run//\'/\\\'}'" resume=auto)

# Tasks have 60 s to end after the first one did; without the limit a failed rank leaves the others waiting in vain.
# They end together when they were told to stop, so a bad exit code alone must not kill them while they save.
# Loaders take the cores of --cpus-per-task, which srun does not inherit by itself.
began=$(mktemp)
srun --wait=60 --kill-on-bad-exit=0 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    python -m lit_data fit "${words[@]}" &
step=$!

# SLURM sends USR1 to this script alone, 300 s before the time limit. SIGTERM lets SaveOnSignal finish the step, write
# interrupted.ckpt and end with exit code 143. A preempted job gets SIGTERM from SLURM and is requeued by it.
asked=no
trap 'asked=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

code=138
while [ "$code" -eq 138 ]; do # 128 + USR1: wait ended because of the trap
    wait "$step"
    code=$?
done
if [ "$asked" = yes ] && [ "$code" -eq 143 ] && [ "$interrupted" -nt "$began" ]; then
    echo "stopped before the time limit; the job is requeued and goes on from $interrupted"
    scontrol requeue "$SLURM_JOB_ID"
fi
rm -f "$began"
exit "$code"
