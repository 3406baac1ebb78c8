#!/bin/sh
# Slurm's Epilog on a compute node: unmounts what prolog.sh mounted.
set -u
conf=${BAFS_BURST_BUFFER_CONF:-/etc/bafs/burst_buffer.conf}
[ -r "$conf" ] || exit 0
place=$(sed -n 's/^ *mounts *= *//p' "$conf" | tail -n 1)/$SLURM_JOB_ID
[ -d "$place" ] || exit 0
# Root may not look into the mount of another user, but it is in the table.
grep -F " $place/" /proc/self/mounts | cut -d ' ' -f 2 | while read -r directory; do
  timeout 30 umount "$directory" || umount -l "$directory"
done
rm -rf "$place/.identity" "$place/.mount.log"
rmdir "$place"/* "$place" 2>/dev/null
exit 0
