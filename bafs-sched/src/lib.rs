//! The scheduler: every policy of BAFS, and the driver of real runs.
//!
//! `bafs run` takes a workflow, decides where its data live and when its jobs run, and records each
//! step in a journal. The core is one deterministic function. Everything else feeds it or obeys it:
//!
//! ```text
//!  text ─▶ workflow ─▶ Workflow ─┐          ┌─▶ Action ─▶ io ─▶ calls to nodes and homes
//!                                ▼          │                    │
//!    StrategySelector, Settings ─▶ logic::Scheduler::step ◀── Event, journaled first
//!                                           ▲
//!    driver: the real cluster ──────────────┤
//!    crate bafs-sim: simulated clusters ────┘
//! ```
//!
//! * [`bafs_workflow`] reads what the user wrote, and returns a checked workflow or a list of
//!   errors.
//! * [`logic`] decides. It has no clock, no I/O and no random numbers, so the same events lead to
//!   the same decisions. It asks a [`logic::StrategySelector`], which it does not know, for the
//!   strategy of a run.
//! * [`driver`] and [`io`] run the decisions: the journal, calls, waiting.
//! * [`report`], [`replay`], [`timeline`] and [`goodput`] say what a run did and why, from its
//!   journal.
//!
//! **Errors.** A wrong workflow is rejected with a list of diagnostics. A failed job, node or home
//! is an event, and the core decides what to do about it. Only a run that cannot go on ends with an
//! error, for example because its journal is damaged.
//!
//! **Units.** Times are milliseconds, sizes bytes and numbers of files.
//!
//! The ideas are from J. Bent, *Data-Driven Batch Scheduling* (2005).
//! `docs/explanation/scheduling.md` and `recovery.md` explain the policies.

pub mod driver;
pub mod goodput;
pub mod io;
pub mod logic;
pub mod replay;
pub mod report;
pub mod timeline;
