#!/bin/sh
# Slurm's Prolog on a compute node: mounts the volumes of a job where $BAFS_NAME says. slurmd runs
# it outside the job's control group, so the end of a step does not end the mounts.
set -eu
conf=${BAFS_BURST_BUFFER_CONF:-/etc/bafs/burst_buffer.conf}
[ -r "$conf" ] || exit 0
value() { sed -n "s/^ *$1 *= *//p" "$conf" | tail -n 1; }
program=$(value program); identity=$(value identity); catalog=$(value catalog)
mounts=$(value mounts)
# Root may not look into the mount of another user, but it is in the table.
place=$mounts/$SLURM_JOB_ID
export BAFS_IDENTITY="$identity" BAFS_CATALOG="$catalog"

# The labels of the volumes, as burst_buffer.lua made them.
labels=$("$program" --json volume list | grep -o '"name":"slurm-[^"]*"' | cut -d '"' -f 4 |
  grep -E "^slurm-($SLURM_JOB_ID|persistent-${SLURM_JOB_UID:-0})-" || true)
[ -n "$labels" ] || exit 0
mkdir -p "$place"
as_user=
if [ "${SLURM_JOB_UID:-0}" != 0 ]; then
  # The user's processes get an identity for these volumes only.
  # shellcheck disable=SC2086
  "$program" grant $labels --to "$place/.identity" --days 30 >/dev/null
  chown -R "$SLURM_JOB_UID:$SLURM_JOB_GID" "$place"
  export BAFS_IDENTITY="$place/.identity"
  as_user="setpriv --reuid=$SLURM_JOB_UID --regid=$SLURM_JOB_GID --clear-groups"
fi
for label in $labels; do
  directory=$place/${label##*-}
  $as_user mkdir -p "$directory"
  # shellcheck disable=SC2086
  setsid $as_user "$program" mount "$label" "$directory" </dev/null >"$place/.mount.log" 2>&1 &
  i=0
  until grep -qF " $directory " /proc/self/mounts; do
    i=$((i + 1))
    [ $i -lt 300 ] || { echo "BAFS: $label is not mounted: $(cat "$place/.mount.log")" >&2; exit 1; }
    sleep 0.1
  done
done
