#!/bin/bash
# Trains a job. Made by okrt slurm, site generic.
# The folder of the log must be there when this is submitted: mkdir -p '/scratch/run 100%'
#SBATCH --job-name="first try"
#SBATCH --chdir=/home/ada
#SBATCH --output="/scratch/run 100%%/slurm-%j.log"
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --mem=8G --comment "for \"all\""

export OMP_NUM_THREADS=1

# Steps are counted anew after a requeue, and MPICH finds what a killed step of the same number left in shared memory.
for _ in $(seq "${SLURM_RESTART_COUNT:-0}"); do srun --mpi=none --nodes=1 --ntasks=1 true; done

srun --mpi=pmi2 --cpus-per-task=1 --wait=30 \
    /opt/okrt/bin/python /opt/okrt/cli/start.py train '/home/ada/it'"'"'s here/job.toml' --out '/scratch/run 100%' --resume '--set=task.path=a b'
code=$?

# 75: the ranks have saved and want to go on. 140: the signal met a rank before it could listen, with nothing to save.
if [ $code = 75 ] || [ $code = 140 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
