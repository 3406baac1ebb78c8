//! How long a workflow takes on machines that are not there: the real scheduler core in front of
//! simulated nodes, links and caches. Table of contents.
//!
//! [`Simulation`] runs one workflow under one [`Policy`]; the same [`Scenario`] gives the same
//! [`Run`], byte for byte, on every machine. `docs/PLANNING.md` says what is modelled.

mod advise;
mod canonical;
mod clusters;
mod contender;
mod copying;
mod decide;
mod engine;
mod link;
mod load;
mod node;
mod outages;
mod policy;
mod random;
mod reading;
mod record;
mod remote;
mod serve;
mod skew;
pub mod study;
mod transfer;
mod warming;

pub use advise::derive_simulated_plan;
pub use canonical::build_canonical_workflow;
pub use decide::{TrialScope, TrialsOutcome, PLAN_JOBS_FAILING_MAX, PLAN_JOBS_MAX, TrialResult, decide_by_simulation};
pub use engine::{Simulation, NoStepTimer, StepTimer};
pub use load::{JobLoad, LoadModel, MeasuredLoad, MountLoad};
pub use policy::{Policy, Scenario};
pub use record::{UsageSample, SimulationResult, ExecutionSpan, StalledRunError};
pub use remote::compare_remote_io;
