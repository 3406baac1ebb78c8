//! The servers of BAFS: home, catalog, and node.
//!
//! Servers are mechanism only. They do what a call asks, report what happened, and leave every
//! policy to the scheduler: where a volume lies, what is copied, and which job runs.
//!
//! ```text
//!  scheduler, agents, peers
//!     │ calls (bafs_proto::message), each with a token
//!     ▼
//!  serving ─▶ access ─▶ node ──┬─ storage ── home_clients ──▶ home servers, S3, SFTP, …
//!             rights           ├─ cache   ── home_clients, peers
//!                              ├─ tree_sessions ── bafs-tree ──▶ directories of volumes
//!                              └─ executor ──▶ one agent process for each job
//!             home_server, catalog: the two other kinds of server
//! ```
//!
//! * [`node`] is one machine: it dispatches calls, tells the catalog of itself, and finds its
//!   peers.
//! * [`storage`] keeps volumes: it makes, fills, extracts and deletes them.
//! * [`cache`] keeps cache volumes and shares their blocks with peers.
//! * [`tree_sessions`] runs the file operations of agents, and [`fd_passing`] hands agents on the
//!   same machine the open files instead.
//! * [`executor`] starts agents and keeps their reports.
//! * [`home_server`] exports the user's own data, and [`catalog`] lists live servers.
//! * [`logic`] has the pure parts: they have no clock and do no I/O, so tests need no server.
//!
//! **Errors.** A call returns a numbered error ([`bafs_proto::error`]). Transient errors are for
//! the caller to repeat, until its deadline. A server repeats only its own calls to homes and
//! peers.
//!
//! **State.** A node keeps its volumes, started executions and receipts on disk, and they survive
//! `kill -9`. A home server keeps uploads and receipts beside the exported data. The catalog keeps
//! nothing.

pub mod access;
pub mod cache;
pub mod catalog;
pub mod clock;
pub mod counters;
pub mod departure;
mod digest_log;
mod errors;
pub mod executor;
pub mod fd_passing;
mod full_disk;
pub mod home_clients;
pub mod home_server;
mod incarnation;
pub mod logic;
pub mod node;
pub mod serving;
mod source;
pub mod start_error;
pub mod storage;
mod table_rows;
pub mod tree_sessions;
