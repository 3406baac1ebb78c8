//! How facts and decisions change the state. Table of contents only.

pub(crate) mod attempts;
pub(crate) mod extractions;
pub(crate) mod failed_logs;
pub(crate) mod isolation;
pub(crate) mod observed_access;
pub(crate) mod user_commands;
