#!/bin/bash
# Prolog=prolog.sh in slurm.conf, with epilog.sh: the node's daemon (cachesvc.service, not enabled) runs while the node has
# jobs, and its memory is free in between. What is on NVMe stays.
#
# It waits until the daemon answers, CACHESVC_PROLOG_S at most (60). A daemon that does not answer keeps no job away: jobs
# with CACHESVC=require then fail, others read from the source.
set -u
jobs=${CACHESVC_JOBS:-/run/cachesvc-jobs}
mkdir -p "$jobs"
exec 9>"$jobs.lock"
flock 9
touch "$jobs/${SLURM_JOB_ID:?}"
systemctl start cachesvc
flock -u 9
end=$((SECONDS + ${CACHESVC_PROLOG_S:-60}))
until /opt/cachesvc/bin/cachesvc status --json >/dev/null 2>&1; do
    if ((SECONDS >= end)); then
        logger -t cachesvc "job $SLURM_JOB_ID starts without a cache: the daemon does not answer"
        break
    fi
    sleep 1
done
exit 0
