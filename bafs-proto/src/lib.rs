//! The wire protocol of BAFS: ids, volumes, calls, errors, tokens, identities and transports.
//!
//! Servers, agents and schedulers depend on this crate and never on each other. It takes no
//! decisions: it defines what can be said, checks that a message is well formed, and carries it.
//!
//! A call passes these layers:
//!
//! ```text
//!  caller                                                server
//!  message::Call ── codec ──▶ RequestHead + body         net::Service::serve
//!    net::pool       retries, one connection a server      ▲
//!    net::channel    chooses QUIC or TCP                   │ token, request, body, deadline
//!    net::quic, tcp  TLS 1.3 ══════════ frames ══════════ net::channel::Listener
//! ```
//!
//! * [`message`] defines each call and its reply, [`file_op`] the POSIX operations inside
//!   [`message::RunFileOps`].
//! * [`error`] numbers the errors. The class of an error says who acts on it: the caller, the
//!   agent, the scheduler, or nobody.
//! * [`token`] says what a caller may do, [`identity`] who it is, and [`bearer`] which part of a
//!   token a call shows.
//! * [`limits`] has the bounds that hold on the wire: a header has at most 1 MiB, a body 4 MiB.
//! * [`inflight_fetches`] is no message: agent and node both fetch a block once for all readers.
//! * [`fd_passing`] is apart. It defines the packets between a node and an agent on one machine.
//!
//! Sizes are in bytes, durations in milliseconds, and integers are little endian. Every message
//! from a peer is untrusted: decoding checks lengths before it allocates.
//!
//! Reading order: [`ids`], [`volume`], [`message`], [`file_op`], [`error`], [`net`].

pub mod advert;
pub mod agent_order;
pub mod attributes;
pub mod bearer;
pub mod block_calls;
pub mod buffer;
pub mod cache;
pub mod codec;
pub mod error;
pub mod fd_passing;
pub mod file_op;
pub mod file_set;
pub mod hash;
pub mod identity;
pub mod ids;
pub mod image;
pub mod inflight_fetches;
pub mod job_arguments;
pub mod job_report;
pub mod limits;
pub mod message;
pub mod net;
pub mod node_quota;
pub mod path;
pub mod queue_call;
pub mod replica;
pub mod source;
pub mod source_warning;
pub mod time;
pub mod token;
pub mod volume;

pub use error::{Error, ErrorClass, ErrorCode, Result};

/// Version of the protocol, told in [`message::Hello`]; the ALPN stays the same, so that another
/// version is refused in words.
///
/// Ledger: 1 = first form (2026-11); 2 = batches of operations in an order, with given numbers;
/// 3 = agents report how long calls were under way, which volumes a job read and changed, and what
/// they held; 4 = allotments of nodes; 5 = a server says that what it asked ahead is waited for,
/// and agents are told that blocks are on their machine; 6 = a server says that it is at it
/// (`InProgress`); 7 = tokens that are good at one server, and a server says that home does not
/// answer it (`HomeUnreachable`); 8 = agents report how often a volume had no space; a server that
/// asks for blocks in place of home says who it is, asks which blocks another one has, and learns
/// pins and peers when it joins a cache; 9 = small files of volumes and uploads with one call,
/// several pieces of an upload under way, maps of sparse files; 10 = volumes live longer once they
/// hold results; who joins a cache learns where its blocks were before, and a server that lacks
/// blocks says who may have them; 11 = copies of volumes that are made from an older one; 12 = who
/// got damaged blocks says so, small files of a home together, bounded files opened early; 13 =
/// small files to a home together, the time of the last change of a file of a source, the words of
/// a job in the body; 14 = a server says which blocks are read soon; 15 = which names in a
/// volume are of one file, how long home is silent for a peer, what is
/// too large for a volume, what a disk has free; 16 = a mount says whether its kernel may collect
/// writes; 17 = a server says at hello which one it is, and who names a home says which one is
/// meant; 18 = who came at the address of a server without its store says so (`StoreLost`);
/// 19 = a job says which directories for temporary files are the host's;
/// agents report whether a job looked at a volume, and of which volumes nothing is counted;
/// what a job printed is read from its node;
/// names in paths are bytes, volumes tell what they do not have as their source has it,
/// directories that cannot be read are entries, a manifest has the top of its source;
/// 20 = calls, fields and counters are named by the glossary of ARCHITECTURE.md; 21 = adverts have
/// an open list of attributes, and the catalog is asked with a constraint; reads of blocks have a
/// scope and a priority, and `Probe`, `Promote` and `Touch` are calls of their own; one call
/// uploads small files, be it one or many; a job says which files it requires and produces; nodes
/// say until when they live, drain, and tell the jobs that their end interrupts (`NodeLeaving`);
/// sets of files go home with one call; a job says what it may use of its node, and a node that
/// ended it for that says so (`MemoryExceeded`, `RuntimeExceeded`); agents report what a job saw of
/// the source of a cache, and how they reached each volume; 22 = a service answers `CallQueue`; a
/// node says which programs it lacks; 23 = volumes change their size, a writer may yield, who
/// renews volumes says whether they give way, agents report the memory of a job, a home says what
/// the digests of blocks are (`ReadDigests`), issues epochs, and fences uploads
/// (`IssueUploadEpoch`, `UploadFenced`); small files are read whole, and directories listed,
/// without a handle (`ReadFile`, `ListDirectory`).
pub const PROTOCOL_VERSION: u32 = 23;

/// Application-layer protocol name that both ends of a connection must offer.
pub const ALPN: &[u8] = b"bafs/1";
