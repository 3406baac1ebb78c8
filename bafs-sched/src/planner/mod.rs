//! Data-driven planning: which data live where and in which order jobs run, decided by a model
//! before anything starts. Pure arithmetic: no clock, no file, no randomness. Table of contents.
//!
//! [`Environment`] and [`CanonicalWorkload`] (or a workflow's [`Shape`]) go in, a [`Plan`] comes
//! out. `docs/PLANNING.md` teaches the strategies and says what was corrected in the printed model.

mod batch_storage;
mod canonical;
mod environment;
mod expected_times;
mod packing;
mod plan_choice;
mod prediction;
mod printed_equations;
mod shape;
mod simulated_plan;
mod strategy;

pub use canonical::{CanonicalParseError, CanonicalWorkload, NotCanonicalError, PrivateLayout};
pub use environment::{Environment, EnvironmentError, NodeClass, RESTART_S_DEFAULT};
pub(crate) use plan_choice::is_need_worthwhile;
pub use plan_choice::{
    Plan, StrategyCandidate, StrategyChoice, plan_with_simulations, plan_workload,
};
pub use prediction::{predict_remaining, predict_time};
pub use printed_equations::predict_printed;
pub use shape::Shape;
pub use simulated_plan::SimulatedPlan;
pub use strategy::{Allocation, Shortage, Strategy, Traversal};
