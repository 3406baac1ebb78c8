//! Everything that the scheduler knows, as plain data. Table of contents only.

pub(crate) mod attempt_index;
pub(crate) mod attempts;
pub(crate) mod cross_pipeline;
pub(crate) mod deletions;
pub(crate) mod extractions;
pub(crate) mod failed_logs;
pub(crate) mod failure_history;
pub(crate) mod invariants;
pub(crate) mod isolation;
pub(crate) mod job_order;
pub(crate) mod jobs;
pub(crate) mod mounts;
pub(crate) mod nodes;
pub(crate) mod observed_access;
pub(crate) mod pipeline_status;
pub(crate) mod progress;
pub(crate) mod ready_queue;
pub(crate) mod scheduler_state;
pub(crate) mod successors;
pub(crate) mod timers;
pub(crate) mod user_commands;
pub(crate) mod volumes;
pub(crate) mod wait_reasons;
pub(crate) mod work_counter;
