//! Data-driven planning: which data live where and in which order jobs run, decided by a model
//! before anything starts. Pure arithmetic: no clock, no file, no randomness. Table of contents.
//!
//! [`Environment`] and [`Canonical`] (or a workflow's [`Shape`]) go in, a [`Plan`] comes out.
//! `docs/PLANNING.md` teaches the strategies and says what was corrected in the printed model.

mod simulated_plan;
mod canonical;
mod plan_choice;
mod environment;
mod expected_times;
mod packing;
mod prediction;
mod printed_equations;
mod batch_storage;
mod shape;
mod strategy;

pub use simulated_plan::SimulatedPlan;
pub use canonical::{CanonicalWorkload, CanonicalParseError, PrivateLayout, NotCanonicalError};
pub(crate) use plan_choice::is_need_worthwhile;
pub use plan_choice::{StrategyCandidate, StrategyChoice, Plan, plan_workload, plan_with_simulations};
pub use environment::{Environment, EnvironmentError, NodeClass, RESTART_S_DEFAULT};
pub use prediction::{predict_time, predict_remaining};
pub use printed_equations::predict_printed;
pub use shape::Shape;
pub use strategy::{Allocation, Shortage, Strategy, Traversal};
