"""Sources, servers, disks and mounts that fail on demand."""
