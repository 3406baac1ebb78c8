//! What the agent decides without waiting: no clock, no file, no network.

pub mod directory;
pub mod known;
pub mod mount_table;
pub mod pages;
