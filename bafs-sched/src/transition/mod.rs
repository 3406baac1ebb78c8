//! How facts and decisions change the state. Table of contents only.

pub(crate) mod advance;
pub(crate) mod attempts;
pub(crate) mod cache_reports;
pub(crate) mod commit;
pub(crate) mod deadlock;
pub(crate) mod deletions;
pub(crate) mod extractions;
pub(crate) mod failed_logs;
pub(crate) mod isolation;
pub(crate) mod node_gathering;
pub(crate) mod node_quotas;
pub(crate) mod observed_access;
pub(crate) mod pipeline_homes;
pub(crate) mod prefetch;
pub(crate) mod queueing;
pub(crate) mod run_end;
pub(crate) mod starts;
pub(crate) mod strategy;
pub(crate) mod strategy_limits;
pub(crate) mod user_commands;
