//! Every bound of the sandbox, with its reason; no other file invents one.

use std::time::Duration;

/// The most volumes that one job may have.
pub const VOLUMES_MAX: usize = bafs_proto::limits::JOB_MOUNTS_MAX;

/// The most entries of one host directory that are bound one by one to make room for a mount
/// point in it. The kernel allows 100,000 mounts in a name space by default.
pub const SHADOWED_ENTRIES_MAX: usize = 20_000;

/// The largest plan in bytes. The kernel allows 6 MiB of arguments and environment at most
/// (three quarters of 8 MiB); as JSON numbers a byte takes up to four.
pub(super) const PLAN_BYTES_MAX: u64 = 32 << 20;

/// The longest report line of a stage.
pub(super) const REPORT_BYTES_MAX: u64 = 1 << 20;

/// How many skipped host entries are named to the caller.
pub(super) const NOTES_MAX: usize = 20;

/// After this long a kill request that the job's init has not obeyed is enforced from outside.
pub(super) const KILL_GRACE: Duration = Duration::from_millis(500);

/// The longest that a kill may take until every process of the job is dead.
pub const KILL_MAX: Duration = Duration::from_secs(2);

// Asked, then forced, then the outer stage as well.
const _: () = assert!(KILL_GRACE.as_millis() * 3 < KILL_MAX.as_millis());
