//! Every bound of the workflow language. It holds no logic; whoever checks a bound names it.

/// Errors (and, apart from them, warnings) that are reported; the rest is only counted.
pub(super) const DIAGNOSTICS_MAX: usize = 20;

/// Bytes of a workflow file. A generated file with a million inline jobs has some 300 MB.
pub const FILE_BYTES_MAX: usize = 512 << 20;

/// Bytes of a job description file, which a person writes.
pub const DESCRIPTION_BYTES_MAX: usize = 1 << 20;

/// Statements and loop turns after expansion: a million jobs with nine statements for each.
pub(super) const STATEMENTS_MAX: u64 = 10_000_000;

/// Bytes in memory of what statements say after expansion: those of [`STATEMENTS_MAX`] short ones.
pub(super) const DECLARED_BYTES_MAX: u64 = 4 << 30;

/// Loops inside loops.
pub(super) const LOOP_DEPTH_MAX: usize = 8;

/// Parent-child pairs; one `parent` line with m parents and n children makes m * n of them.
pub const EDGES_MAX: u64 = 20_000_000;

/// Bytes of a job's or volume's name: what a file name may have, as stores use names so.
pub(super) const NAME_BYTES_MAX: usize = 255;

/// Bytes of a path or URL: the kernel's `PATH_MAX`, less the final zero.
pub(super) const PATH_BYTES_MAX: usize = bafs_proto::limits::PATH_BYTES_MAX;

/// Bytes of one name in a path: the kernel's `NAME_MAX`.
pub(super) const PATH_NAME_BYTES_MAX: usize = bafs_proto::limits::NAME_BYTES_MAX;

/// Mounts of one job: what an agent takes.
pub(super) const MOUNTS_MAX: usize = bafs_proto::limits::JOB_MOUNTS_MAX;

/// Bytes of the names and paths of a job's mounts together: what one message carries.
pub(super) const MOUNT_BYTES_MAX: usize = bafs_proto::limits::JOB_MOUNT_BYTES_MAX;

/// Files of one cache volume: what a node takes of a home's listing.
pub(super) const CACHE_FILES_MAX: u64 = bafs_proto::limits::MANIFEST_ENTRIES_MAX as u64;

/// Bytes of one argument, or of a variable with its name and `=`: the kernel's `MAX_ARG_STRLEN`,
/// less the final zero.
pub(super) const WORD_BYTES_MAX: usize = (128 << 10) - 1;

/// Bytes of all of a job's words, with a final zero and a pointer for each: what one message
/// carries.
pub(super) const WORDS_BYTES_MAX: usize = 4 << 20;

/// The same as most nodes take them: a quarter of a stack of 8 MiB.
pub(super) const WORDS_BYTES_COMMON: usize = 2 << 20;

/// Bytes of one volume or of one job's memory: 1000 PB, so that eighteen of them still fit a u64.
pub(super) const SIZE_BYTES_MAX: u64 = 1_000_000_000_000_000_000;

/// Files of one volume, far from where sums over a workflow overflow.
pub const FILES_MAX: u64 = 1_000_000_000_000;

/// Seconds of a job's declared run time: ten years.
pub const RUNTIME_S_MAX: u64 = 10 * 365 * 86_400;

/// CPUs of one job.
pub(super) const CPUS_MAX: u64 = 65_536;

/// Re-runs of one job.
pub(super) const RETRIES_MAX: u64 = 1_000;

/// Width of a zero-padded loop variable: the digits of a u64.
pub(super) const PAD_WIDTH_MAX: usize = 20;

/// A volume without `files N` may hold one file per 16 KiB, the inode ratio of a default ext4.
pub(super) const BYTES_PER_FILE_DEFAULT: u64 = 16 << 10;

/// No volume is given fewer files than this by default.
pub(super) const FILES_DEFAULT_MIN: u64 = 1_024;

/// Names that are compared for a "did you mean": seconds spent on a hint are not worth it.
pub(super) const NEAREST_CANDIDATES_MAX: usize = 20_000;

/// Edges that all searches for an order between users of volumes may look at together.
pub(super) const SEARCH_EDGES_MAX: u64 = 100_000_000;

/// Jobs of a cycle that are printed before the rest is only counted.
pub(super) const CYCLE_JOBS_SHOWN_MAX: usize = 12;

/// Highest priority of a job; the lowest is as far below zero.
pub(super) const PRIORITY_MAX: i32 = 1_000_000;

/// Bytes of a file that a loop goes through: ten million lines with some letters each are fewer.
pub(super) const LIST_BYTES_MAX: usize = 256 << 20;

/// Values of one list: each makes a loop turn, which [`STATEMENTS_MAX`] bounds.
pub(super) const LIST_ITEMS_MAX: usize = STATEMENTS_MAX as usize;

/// Bytes of an included file, which is held in memory with its statements.
pub(super) const INCLUDE_BYTES_MAX: usize = 64 << 20;

/// Includes inside includes.
pub(super) const INCLUDE_DEPTH_MAX: usize = 8;

/// Bytes of a script: it is one argument of its interpreter.
pub(super) const SCRIPT_BYTES_MAX: usize = WORD_BYTES_MAX;
