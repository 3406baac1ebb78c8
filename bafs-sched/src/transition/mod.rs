//! How facts and decisions change the state. Table of contents only.

pub(crate) mod attempts;
pub(crate) mod commit;
pub(crate) mod copies;
pub(crate) mod extractions;
pub(crate) mod failed_logs;
pub(crate) mod failures;
pub(crate) mod full_disks;
pub(crate) mod isolation;
pub(crate) mod node_losses;
pub(crate) mod observed_access;
pub(crate) mod quarantine;
pub(crate) mod returned_nodes;
pub(crate) mod roll_back;
pub(crate) mod small_volumes;
pub(crate) mod user_commands;
pub(crate) mod volume_sizes;
