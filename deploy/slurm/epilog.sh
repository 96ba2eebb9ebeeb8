#!/bin/bash
# Epilog=epilog.sh in slurm.conf: the last job of a node stops the daemon that prolog.sh started.
set -u
jobs=${CACHESVC_JOBS:-/run/cachesvc-jobs}
exec 9>"$jobs.lock"
flock 9
rm -f "$jobs/${SLURM_JOB_ID:?}"
rmdir "$jobs" 2>/dev/null && systemctl stop cachesvc
exit 0
