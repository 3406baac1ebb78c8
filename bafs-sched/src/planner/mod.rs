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

pub use advice::Advice;
pub use canonical::{Canonical, CanonicalError, Layout, NotCanonical};
pub(crate) use choose::is_worth_no_plan;
pub use choose::{Candidate, Choice, Plan, plan, plan_advised};
pub use environment::{Environment, EnvironmentError, NodeClass, RESTART_S};
pub use predict::{predict, predict_rest};
pub use printed::predict_printed;
pub use shape::Shape;
pub use strategy::{Allocation, Shortage, Strategy, Traversal};
