//! The deterministic core of the scheduler: facts in, decisions out. Table of contents only; no
//! clock, no I/O, no randomness anywhere below.
//!
//! [`Scheduler::step`] takes an [`Event`] and answers with [`Action`]s. Replaying the events of a
//! journal gives the same state again.

mod action;
mod again;
mod allot;
mod attempt;
mod away;
mod batch;
mod blockade;
mod chains;
mod checkpoint;
mod computing;
mod copies;
mod course;
mod crossings;
mod cut_off;
mod declared;
pub mod division;
mod event;
mod expected_nodes;
mod extraction;
mod failure;
mod fit;
mod fit_caches;
mod fleet;
mod followers;
mod full_disk;
mod gathering;
mod graph;
mod growth;
mod guide;
mod invariants;
mod leaving;
mod mounted;
mod overdue;
mod place;
mod progress;
mod queues;
mod recover;
mod release;
mod reweigh;
mod rules;
mod safety;
mod scheduler;
mod settings;
mod shares;
mod sizes;
mod skew;
mod space;
mod standing;
mod steering;
mod surveys;
mod tally;
mod timers;
mod trial;
mod troubles;
mod under_way;
mod volumes;
mod waiting;
mod warming;

pub use action::{Action, MountedVolume};
pub use allot::Demand;
pub use checkpoint::{CheckpointPolicy, Decision, Moved, Receipt};
pub use declared::Warning;
pub use event::{Event, NodeSeen, NodeShare, Wish};
pub(crate) use fit::WITH_A_PLAN;
pub use full_disk::{FREE_OR_OFFER_LESS, RUN_ANEW};
pub use graph::JobState;
pub use guide::{Followed, Guide};
pub use progress::{JobFailure, Outcome, Progress};
pub use rules::{Order, Rules};
pub use scheduler::Scheduler;
pub use settings::{Io, Settings};
pub use space::Space;
