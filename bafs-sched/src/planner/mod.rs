//! Data-driven planning: which data live where and in which order jobs run, decided by a model
//! before anything starts. Pure arithmetic: no clock, no file, no randomness. Table of contents.
//!
//! [`Environment`] and [`Canonical`] (or a workflow's [`Shape`]) go in, a [`Plan`] comes out.
//! `docs/PLANNING.md` teaches the strategies and says what was corrected in the printed model.

mod advice;
mod canonical;
mod choose;
mod environment;
mod expected;
mod packing;
mod predict;
mod printed;
mod room;
mod shape;
mod strategy;

pub use advice::SimulatedPlan;
pub use canonical::{CanonicalWorkload, CanonicalParseError, PrivateLayout, NotCanonicalError};
pub(crate) use choose::is_need_worthwhile;
pub use choose::{StrategyCandidate, StrategyChoice, Plan, plan_workload, plan_with_simulations};
pub use environment::{Environment, EnvironmentError, NodeClass, RESTART_S_DEFAULT};
pub use predict::{predict_time, predict_remaining};
pub use printed::predict_printed;
pub use shape::Shape;
pub use strategy::{Allocation, Shortage, Strategy, Traversal};
