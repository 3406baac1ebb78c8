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

pub use advise::advise;
pub use canonical::workflow_of;
pub use decide::{Doubt, Doubts, PLAN_JOBS_FAILING_MAX, PLAN_JOBS_MAX, Tried, decide};
pub use engine::{Simulation, Unwatched, Watch};
pub use load::{JobLoad, Load, Measured, MountLoad};
pub use policy::{Policy, Scenario};
pub use record::{Moment, Run, Spell, Stuck};
pub use remote::beside_remote;
