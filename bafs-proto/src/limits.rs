//! Every bound of the protocol, with the reason; nothing is unbounded.

/// Programs that a node is asked for with one call: a head holds as many short paths.
pub const PROGRAMS_MAX: usize = 500;

/// Largest encoded request or reply header, in bytes. A manifest page or a directory page is the
/// largest legitimate header.
pub const HEAD_BYTES_MAX: u32 = 1 << 20;

/// Largest raw body of one request or reply, in bytes: longer data goes in several requests, so
/// that memory stays bounded and a cut loses little.
pub const BODY_BYTES_MAX: u32 = 4 << 20;

/// Largest single read or write of a file operation, in bytes; the kernel asks for no more
/// (`max_write` of the FUSE session).
pub const IO_BYTES_MAX: u32 = 1 << 20;

/// Most bytes by which a piece of an upload may come before its turn: fills a link of 1 Gbit/s at
/// 60 ms.
pub const PUT_REORDER_BYTES_MAX: u32 = 8 << 20;

/// Most bytes of entries in one answer of a directory stream: a listing of a large directory comes
/// in pages.
pub const DIRECTORY_PAGE_BYTES_MAX: u32 = 256 << 10;

/// Smallest block of a cache volume, in bytes.
pub const BLOCK_BYTES_MIN: u32 = 4 << 10;

/// Largest block of a cache volume, in bytes.
pub const BLOCK_BYTES_MAX: u32 = 4 << 20;

/// Block of a cache volume when nobody says otherwise, in bytes. Small enough that programs which
/// touch little fetch little (`docs/decisions/0007`), large enough to fill a wide-area link.
pub const BLOCK_BYTES_DEFAULT: u32 = 64 << 10;

/// Of each stream of a job's output so many bytes are kept from its beginning, where programs say
/// what they are about to do.
pub const JOB_LOG_HEAD_BYTES: usize = 64 << 10;

/// So many are kept from its end, where they say why they failed.
pub const JOB_LOG_TAIL_BYTES: usize = 192 << 10;

/// What is kept of one stream at most, with the line that says what was left out.
pub const JOB_LOG_BYTES_MAX: usize = JOB_LOG_HEAD_BYTES + JOB_LOG_TAIL_BYTES + 128;

/// Longest file name, in bytes (`NAME_MAX`).
pub const NAME_BYTES_MAX: usize = 255;

/// Longest path, in bytes, without the final zero (`PATH_MAX`).
pub const PATH_BYTES_MAX: usize = 4095;

/// Most mounts of one job: each costs a session of its agent, and a few mounts in the kernel.
pub const JOB_MOUNTS_MAX: usize = 1_024;

/// Most bytes of the names and paths of a job's mounts together: they travel in the head that
/// starts the job, beside a token for each.
pub const JOB_MOUNT_BYTES_MAX: usize = 256 << 10;

/// Longest value of an extended attribute, in bytes (`XATTR_SIZE_MAX`).
pub const XATTR_BYTES_MAX: usize = 64 << 10;

/// Longest text that travels in an error, in bytes.
pub const ERROR_DETAIL_BYTES_MAX: usize = 1024;

/// Most files that one session has open before its server has opened them; further ones are
/// opened by the server, which may run out of descriptors and then says so.
pub const EARLY_HANDLES_MAX: u32 = 2048;

/// Most file operations in one batch.
pub const BATCH_OPS_MAX: usize = 4096;

/// Largest capability token, in bytes.
pub const TOKEN_BYTES_MAX: usize = 8 << 10;

/// Most blocks of a capability token, with the first: each costs its reader a signature and a
/// check. BAFS appends three: a grant, what is given to an agent, and what that shows with a call.
pub const TOKEN_BLOCKS_MAX: usize = 9;

/// Most files that go home with one call: each has a path and a token in the head.
pub const PUT_FILES_MAX: usize = 64;

/// Most entries in one page of a listing.
pub const PAGE_ENTRIES_MAX: usize = 2048;

/// Most digests of blocks in one reply: a quarter of a head.
pub const DIGESTS_MAX: u32 = 8192;

/// Most files of one cache volume.
pub const MANIFEST_ENTRIES_MAX: usize = 4_000_000;

/// Most concurrent streams that one peer may open, and so most requests in flight per connection.
pub const STREAMS_MAX: u32 = 1024;

/// Longest time a request may ask for, in milliseconds.
pub const DEADLINE_MS_MAX: u32 = 24 * 3600 * 1000;

/// Deadline of a remote operation when nobody says otherwise, in milliseconds.
pub const OP_DEADLINE_MS_DEFAULT: u64 = 30_000;

/// Numbers of files and handles from here on are given by agents, to what their operations make
/// before a server has answered; servers count theirs from 1.
pub const AGENT_NUMBER_FIRST: u64 = 1 << 61;

/// Numbers of files from here on are given by servers, to files whose own number is taken. No file
/// system in use reaches them by itself.
pub const SUBSTITUTE_NUMBER_FIRST: u64 = 1 << 62;

const _: () = assert!(AGENT_NUMBER_FIRST < SUBSTITUTE_NUMBER_FIRST);
const _: () = assert!(IO_BYTES_MAX <= BODY_BYTES_MAX);
const _: () = assert!(DIRECTORY_PAGE_BYTES_MAX <= HEAD_BYTES_MAX / 4);
const _: () = assert!(BLOCK_BYTES_MAX <= BODY_BYTES_MAX);
const _: () = assert!(DIGESTS_MAX <= HEAD_BYTES_MAX / 4 / 32);
const _: () = assert!(BODY_BYTES_MAX / BLOCK_BYTES_MIN <= DIGESTS_MAX);
const _: () = assert!(BLOCK_BYTES_MIN <= BLOCK_BYTES_DEFAULT);
const _: () = assert!(BLOCK_BYTES_DEFAULT <= BLOCK_BYTES_MAX);
const _: () = {
    let more = ERROR_DETAIL_BYTES_MAX + 256;
    let file = TOKEN_BYTES_MAX + PATH_BYTES_MAX + more;
    assert!(PUT_FILES_MAX * file < HEAD_BYTES_MAX as usize);
};
const _: () = assert!(PAGE_ENTRIES_MAX * NAME_BYTES_MAX < HEAD_BYTES_MAX as usize);
