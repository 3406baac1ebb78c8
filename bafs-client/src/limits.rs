//! Bounds of the agent, each with its reason. The sandbox and the protocol have their own, and what
//! only one algorithm counts or waits for is told there.

use std::time::Duration;

/// How long the kernel may believe names and attributes of a volume that changes through this
/// kernel only.
pub(crate) const ATTRIBUTE_TTL: Duration = Duration::from_secs(24 * 3600);

/// Threads that serve one volume: one for each processor, between these. Operations on this machine
/// wait for its disk in them, so one would let it stand idle; more than processors make metadata
/// slower, as each wakes up in vain.
pub(crate) const SESSION_THREADS_MIN: usize = 2;
pub(crate) const SESSION_THREADS_MAX: usize = 16;

/// Volumes of one agent that have readers of their own, which is fastest; others share theirs.
pub(crate) const READER_SLOTS_MAX: usize = 8;

/// Threads of all those volumes together: each has a buffer of a mebibyte, which takes memory once
/// a large write came.
pub(crate) const OWN_READERS_MAX: usize = 32;

/// Threads that read for all other volumes, at most: operations on this machine wait for its disk
/// in them.
pub(crate) const SHARED_READERS_MAX: usize = 32;

/// The largest write that is asked of a volume that shares its readers, in bytes: each reader has a
/// buffer for it.
pub(crate) const SHARED_WRITE_BYTES_MAX: u32 = 256 << 10;

/// Buffers of all rings of an agent, of a mebibyte each, and the fewest of one ring that are of
/// use: some of them wait for the disk.
pub(crate) const RING_BUFFERS_TOTAL_MAX: usize = 64;
pub(crate) const RING_ENTRIES_MIN: usize = 4;

/// Requests that one ring takes at once. Those that wait for the disk in threads of their own (to
/// sync, to copy) keep their place; the rest must not wait for them. Each has buffers of a
/// mebibyte, which take memory once they were used, and the kernel uses the same few again.
pub(crate) const RING_ENTRIES_MAX: usize = 16;

/// Processors of a machine where volumes are served by rings, at most: the kernel wants a ring for
/// each that the machine may have, whether the job may use it or not.
pub(crate) const RING_PROCESSORS_MAX: u16 = 16;

/// Bytes that the kernel reads ahead, in KiB: 128 (its default) costs a fifth of the rate of
/// sequential reads, and more than 1024 brings nothing.
pub(crate) const READ_AHEAD_KIB: u32 = 1024;

/// Its default, where nobody may raise it, in KiB.
pub(crate) const DEFAULT_READ_AHEAD_KIB: u32 = 128;

/// The same for a volume behind a server, in KiB: so many requests of 1 MiB are on their way at
/// once, which fills a link of 1 GB/s up to 8 ms long.
pub(crate) const REMOTE_READ_AHEAD_KIB: u32 = 8192;

/// Encoded bytes of one directory page. The kernel asks for 32 KiB of its own form, in which an
/// entry with attributes takes about a third more than in ours.
pub(crate) const DIRECTORY_PAGE_BYTES: u32 = 24 << 10;

/// Most bytes that one `copy_file_range` moves: a short copy is allowed, a missed deadline not.
pub(crate) const COPY_BYTES_MAX: u64 = 64 << 20;

/// Blocks of one cache volume, or small files of one scratch volume, that the agent keeps, in
/// bytes: enough for read-ahead of several files at once, while the page cache of the kernel does
/// the real caching. One is kept at least.
pub(crate) const BLOCK_BUFFER_BYTES: usize = 16 << 20;

/// What an agent keeps of data that pass through it when nobody says otherwise, in bytes: some
/// operations of the largest size for each of a hundred processes, and four volumes' blocks.
pub(crate) const MEMORY_BYTES_DEFAULT: u64 = 256 << 20;

/// A file of at most so many bytes is read whole by the one writer of a volume, as a block of a
/// cache is.
pub(crate) const SMALL_FILE_BYTES_MAX: u32 = 64 << 10;

/// Small files, and directories, of one volume that listings showed, and that may be fetched before
/// a program asks for them: 100 bytes each, about.
pub(crate) const SIBLINGS_MAX: usize = 1 << 16;

/// Files of blocks on this machine that an agent keeps open for one volume.
pub(crate) const LOCAL_BLOCK_FILES_MAX: usize = 64;

/// A cache volume whose files have so many bytes on average lets the kernel read whole files by
/// itself, at the price of a request for each open: what that saves on the bytes of such a file is
/// ten times what its open costs. Smaller ones are opened without any request instead.
pub(crate) const PASSTHROUGH_FILE_BYTES_MIN: u64 = 1 << 20;

/// Times that a block with a wrong digest is asked for again before the volume is given up.
pub(crate) const DIGEST_RETRIES: u32 = 3;

/// Longest pause between two signs of life of a session, in milliseconds.
pub(crate) const LEASE_RENEWAL_INTERVAL_MS_MAX: u64 = 1_000;

/// Time for the polite end of a session, in milliseconds; the lease ends it otherwise.
pub(crate) const CLOSE_TIMEOUT_MS: u64 = 2_000;

/// The same, when the volume is to be kept longer from then on: nothing else would tell its server.
pub(crate) const CLOSE_AND_EXTEND_TIMEOUT_MS: u64 = 10_000;

/// Time to get something handed over at the door of a node, in milliseconds: one that is busy or on
/// another machine must not hold a job up.
pub(crate) const HANDOFF_TIMEOUT_MS: u64 = 5_000;

/// Time for the answer to a request at the door, in milliseconds.
pub(crate) const HANDOFF_CALL_TIMEOUT_MS: u64 = 10_000;

/// Time for a node to give a whole file, in milliseconds: whoever opens the file waits for it, and
/// can do without.
pub(crate) const PIN_FILE_TIMEOUT_MS: u64 = 1_000;

/// Forgotten references that are sent in one batch.
pub(crate) const FORGET_BATCH_MAX: usize = 1_024;

/// The server hears after so long what was forgotten, in milliseconds.
pub(crate) const FORGET_INTERVAL_MS: u64 = 500;

/// Files of one volume whose touched pages are counted.
pub(crate) const TOUCHED_FILES_MAX: usize = 100_000;

/// Runs of pages in one report, over all volumes: 16 bytes each, and a report must fit a header.
pub(crate) const REPORT_RUNS_MAX: usize = 20_000;

/// Files of a directory that is shown to a job as it is which are compared with what they were; of
/// more nobody knows. A look takes a tenth of a second.
pub(crate) const COMPARED_FILES_MAX: u64 = 50_000;

/// Directories of a volume that are watched for reads; of more nobody knows. Each takes a
/// kilobyte of the kernel's memory.
pub(crate) const WATCHED_DIRECTORIES_MAX: usize = 4_096;

/// Time of a change is told in ticks of the kernel, of 10 ms at the most: what a job does is told
/// apart from what was done before.
pub(crate) const FILE_TIME_TICK: Duration = Duration::from_millis(12);

/// How often an agent looks at what the disk below such a directory has free.
pub(crate) const DISK_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Text of all pages in a report, in bytes: who reads it takes 16 MiB as a whole.
pub(crate) const REPORT_PAGES_BYTES_MAX: usize = 8 << 20;

/// Bytes of a job's standard output and error that a report keeps.
pub(crate) const OUTPUT_TAIL_BYTES: usize = 64 << 10;

/// Longest job specification that an agent reads, in bytes.
pub(crate) const SPEC_BYTES_MAX: u64 = 64 << 20;

/// Part of the memory for written data that one volume may take whose writes the kernel collects,
/// in percent: the kernel gives a FUSE file system 1, and a disk all. One server that is slow or
/// away must not have all programs of the machine wait.
pub(crate) const WRITE_BACK_PERCENT_MAX: u32 = 40;

/// Pause between two looks at what has come of it.
pub(crate) const WRITE_BACK_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Nothing comes any more of what the kernel has collected when nothing has come for so long.
pub(crate) const WRITE_BACK_QUIET: Duration = Duration::from_millis(200);

/// A mount that is asked to end waits so long for the next that the kernel has collected.
pub(crate) const WRITE_BACK_SYNC_IDLE_MAX: Duration = Duration::from_secs(20);

/// It waits no longer in all, as programs may write on.
pub(crate) const WRITE_BACK_SYNC_MAX: Duration = Duration::from_secs(600);

/// After the end of a job's processes nothing more comes of what the kernel collected of their
/// writes, when nothing came for so long.
pub(crate) const WRITE_BACK_CLOSE_IDLE_MAX: Duration = Duration::from_secs(2);

/// How long a detached volume may take until the kernel lets it go.
pub(crate) const DETACH_TIMEOUT: Duration = Duration::from_secs(2);

/// Bytes of one volume that were answered as written and have not reached its server. What is
/// beyond waits: enough for 1 GB/s at 30 ms, and lost with the agent.
pub(crate) const LOG_BYTES_MAX: u64 = 32 << 20;

/// Operations that were answered and have not reached the server, at about 300 bytes. An fsync
/// waits for all of them: a server runs some 20,000 in a second. Enough for so many at 200 ms.
pub(crate) const LOG_OPS_MAX: u64 = 4_096;
pub(crate) const LOG_OP_BYTES: u64 = 300;

/// Operations of one batch: their answers fit a header.
pub(crate) const BATCH_OPS_MAX: usize = 1_024;

/// Data of one batch, in bytes: one large write of the kernel, which then is not copied again.
pub(crate) const BATCH_BYTES: usize = 1 << 20;

/// Batches of one volume on their way to the server.
pub(crate) const BATCHES_MAX: usize = 8;

/// Pages of a directory that are read to know all its names; a larger one is left to the server.
pub(crate) const DIRECTORY_PAGES_MAX: usize = 8;

/// Names of a directory that are remembered while a program reads it.
pub(crate) const STREAM_NAMES_MAX: usize = 1 << 16;

/// Files of one volume that a listing looks up for the kernel, before that asks for them. Each may
/// cost the node a descriptor.
pub(crate) const LISTED_FILES_MAX: usize = 8_192;

/// Names of one volume that are known by their directories, at about 60 bytes.
pub(crate) const CACHED_NAMES_MAX: usize = 1 << 20;

/// First pause after an operation that did not reach its server, in milliseconds; doubles up to
/// the longest.
pub(crate) const RETRY_PAUSE_MS_MIN: u64 = 20;
pub(crate) const RETRY_PAUSE_MS_MAX: u64 = 1_000;

/// Time for the keeper of a mount to begin its watch.
pub(crate) const WATCHDOG_READY_TIMEOUT: Duration = Duration::from_secs(5);

/// Time for the keeper of a mount that is gone to end.
pub(crate) const WATCHDOG_EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// A job that a signal asks to end may take so long before it is killed. Batch systems kill us in
/// turn after 30 s or more, and its volumes are to be written before.
pub(crate) const TERMINATION_GRACE: Duration = Duration::from_secs(10);

/// The shortest silence of an agent that its watchers act on, whatever the deadline: a busy
/// machine makes an agent wait.
pub(crate) const SILENCE_TIMEOUT_MIN: Duration = Duration::from_secs(3);

/// Time for one look at a mount that may hang.
pub(crate) const MOUNT_PROBE_TIMEOUT: Duration = Duration::from_secs(2);
