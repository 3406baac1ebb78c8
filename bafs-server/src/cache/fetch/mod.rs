//! Part 2 of a generation: the fetches of blocks that this node lacks. Stores nothing itself.
//!
//! | File | Content |
//! |---|---|
//! | `fetcher.rs` | what all caches of the node share: peers, limiters, memory budgets |
//! | `read.rs` | a read: local blocks, then the fetch of the others |
//! | `inflight.rs` | the running fetches of a generation: single flight |
//! | `extent_fetch.rs` | runs one fetch: primary node, probes, home |
//! | `peer_requests.rs` | asks peers |
//! | `origin.rs` | asks home, within a limit |
//! | `home_digests.rs` | asks home what the blocks of peers must be |
//! | `probes.rs` | answers peers that are about to ask home |
//! | `reply_errors.rs` | says whose fault a failed read is |
//! | `read_ahead.rs` | fetches ahead of readers that read in order |

pub(crate) mod extent_fetch;
pub(crate) mod fetcher;
pub(crate) mod home_digests;
pub(crate) mod inflight;
pub(crate) mod origin;
pub(crate) mod peer_requests;
pub(crate) mod probes;
pub(crate) mod read;
pub(crate) mod read_ahead;
pub(crate) mod reply_errors;
