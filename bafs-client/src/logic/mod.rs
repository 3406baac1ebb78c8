//! What the agent decides without waiting: no clock, no file, no network.

pub mod around;
pub mod delegation;
pub mod directory;
pub mod image;
pub mod known;
pub mod learning;
pub mod log;
pub mod mount_table;
mod opening;
pub mod pages;
pub mod questions;
mod renaming;
pub mod settling;
