#!/bin/bash
# Runs a sweep. Made by okrt slurm, site generic.
# The folder of the log must be there when this is submitted: mkdir -p /scratch
#SBATCH --job-name=scaling
#SBATCH --chdir=/home/ada
#SBATCH --output=/scratch/scaling-%j.log
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --mem=8G --comment "for \"all\""

# The signal comes to this shell, which passes it on to the sweep.
sweep= asked=
trap 'asked=yes; [ -z "$sweep" ] || kill -USR2 "$sweep"' USR2

export OMP_NUM_THREADS=1

# Steps are counted anew after a requeue, and MPICH finds what a killed step of the same number left in shared memory.
for _ in $(seq "${SLURM_RESTART_COUNT:-0}"); do srun --mpi=none --nodes=1 --ntasks=1 true; done

/opt/okrt/bin/python -m okrt sweep /home/ada/scaling.toml --out /scratch/scaling.h5 \
    --launcher 'srun --mpi=pmi2 --cpus-per-task=1 --wait=30' &
sweep=$!
[ -z "$asked" ] || kill -USR2 "$sweep"

# A signal ends the wait, not the sweep.
while asked=; wait "$sweep"; code=$?; [ -n "$asked" ]; do :; done

# 75: the sweep wants to go on. 140: the signal met it before it could listen, with nothing to save.
if [ $code = 75 ] || [ $code = 140 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
