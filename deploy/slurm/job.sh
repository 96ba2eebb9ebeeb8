#!/bin/bash
# A job whose nodes share one cache: the daemons start before the command, and end after it.
#
#   sbatch job.sh python train.py
#
# --job-dir names a folder that all nodes see, where home directories are not shared. Where prolog.sh starts the nodes' own
# daemons, the last line is: srun "$@"
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
export CACHESVC=require # training does not begin without its cache
srun cachesvc run --job-cluster --ram 50% --allow s3://bucket/ -- "$@"
