//! Cache volumes of a node, and its part in cooperative caches. Checks no right and knows no
//! reservation: the node does.
//!
//! ```text
//!   agent of this node            peer: another node            node
//!         │ socket   │ network        │ ReadBlocks, Probe         │ create, invalidate, remove,
//!         ▼          ▼                ▼ Promote, Touch            ▼ warm, maintain, describe
//!     handoff.rs   calls.rs ◀─────────┘                       caches.rs, maintenance.rs, status.rs
//!         └────┬─────┘                                            │
//!              ▼                                                  ▼
//!        fetch/read.rs ───▶ a Generation (generation.rs) ◀─── volume.rs
//!              │            ├─ store        blocks on disk, manifest, pins       store/
//!              │            ├─ inflight     fetches that readers may join        fetch/inflight.rs
//!              │            ├─ digests      home on blocks of peers       fetch/home_digests.rs
//!              │            ├─ membership   peers, primary nodes, classes        membership/
//!              │            └─ statistics   counters                             statistics.rs
//!              ▼
//!        fetch/extent_fetch.rs ─┬─▶ fetch/peer_requests.rs ─▶ primary node, next nodes; probes
//!                               └─▶ fetch/origin.rs ────────▶ home
//! ```
//!
//! **A miss.** `fetch::read::BlockReader` reads a run of blocks. It takes blocks from `store`. It
//! joins the running fetch of each other block, or starts one (`inflight`). A fetch is a task of
//! its own, for neighbouring blocks of one extent. It asks the primary node, which `membership`
//! names. On the primary node itself it probes the peers that may have the blocks, then asks home.
//! It verifies the blocks, stores them, and gives them to all waiting readers.
//! `docs/explanation/cache.md` shows the whole way of a miss, from the program to home and back.
//!
//! **Promises.** Home sends each block once to all members together (`fetch/inflight.rs` says why).
//! No reader gets bytes that do not match their digest (`store/insert.rs`, `store/disk.rs`), and a
//! home server vouches for the digests of blocks that peers send (`fetch/home_digests.rs`). A
//! generation never mixes two states of its source. Every wait has a deadline.
//!
//! **Generations.** A volume has one generation at a time. Each of the five parts alone changes its
//! own fields. A new state of the source makes a new generation, which takes over the blocks of
//! unchanged files. Readers of the old one get `SourceChanged`.
//!
//! **Reading order**: `generation.rs`, `fetch/read.rs`, `fetch/inflight.rs`,
//! `fetch/extent_fetch.rs`; then the folder of the part in question. Tests:
//! `bafs-server/tests/cache`.

mod block_run;
mod caches;
mod calls;
mod errors;
mod fetch;
mod generation;
mod handoff;
mod locks;
mod maintenance;
mod membership;
mod record;
mod retained_data;
mod statistics;
mod status;
mod store;
mod volume;
mod warming;

pub use caches::Caches;
