//! What the agent decides without waiting: no clock, no file, no network.

pub mod directory;
pub mod pages;
