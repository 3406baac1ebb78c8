//! Part 1 of a generation: the blocks on this node's disk, and the manifest that says what they are
//! blocks of. Sends no message.
//!
//! | File | Content |
//! |---|---|
//! | `block_store.rs` | the store: what the other parts call |
//! | `manifest.rs`, `pins.rs` | the files of the source; the paths whose blocks stay |
//! | `disk.rs` | the blocks, and their table in memory |
//! | `insert.rs`, `reclaim.rs` | verifies and writes blocks, frees their space |
//! | `journal.rs` | which blocks survive a restart |
//! | `agent_map.rs`, `held_files.rs` | what agents on this machine read without a request |
//! | `file_checks.rs` | verifies whole files before an agent gets them |
//! | `former_agents.rs` | leaves files to agents of an earlier life of the node |
//!
//! `CacheDisk` is one type over five files, because each of its operations takes a few of the same
//! locks. Their order is in `disk.rs`.

mod agent_map;
mod block_files;
pub(crate) mod block_store;
pub(crate) mod disk;
pub(crate) mod file_checks;
mod former_agents;
mod held_files;
pub(crate) mod insert;
mod journal;
pub(crate) mod manifest;
pub(crate) mod pins;
mod reclaim;
